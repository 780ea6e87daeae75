"""Grammars that constrain replies: their conversion to llguidance's form, and their compilation."""
