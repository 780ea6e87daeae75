"""Grammars that constrain replies: from what clients send to llguidance's form, and their compilation."""
