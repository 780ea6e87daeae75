"""One module for each family of models, with the marks of its reasoning and calls."""
