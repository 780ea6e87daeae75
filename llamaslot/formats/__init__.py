"""Reasoning and tool calls in the output of chat models, which each model family marks in its own way.

`format_of` in `recognition.py` finds the format that a chat template belongs to. A `Format` then makes parsers of
the output, grammars that force calls, and the text of calls. Pure functions over text: no model, no event loop, no
HTTP.
"""
