"""Conversion of request bodies to `TextRequest`s, without HTTP.

The prompt worker decodes and checks bodies, because large or hostile ones take long. Nothing here knows aiohttp,
and nothing waits.
"""
