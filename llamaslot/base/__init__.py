"""Types that all packages share: messages between processes, errors, facts about the model."""
