"""Constraints in the engine: compiled grammars, and the masks of the tokens that they allow."""
