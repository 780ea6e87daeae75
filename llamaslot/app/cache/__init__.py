"""The cache's tiers as the configuration wants them: budgets, the disk, the remote store."""
