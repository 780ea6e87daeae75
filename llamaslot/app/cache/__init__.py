"""Set-up of the cache's tiers from the configuration: budgets, the disk, the remote store."""
