"""Parsers and grammars for reasoning and tool calls, which each model family writes in its own syntax.

`format_of` in `recognition.py` picks the format from the chat template. A `Format` creates output parsers and
grammars that force calls, and renders calls as text. Pure functions over text: no model, no event loop, no HTTP.
"""
