"""Request bodies of the HTTP API, and what they ask for, without HTTP.

The prompt worker decodes and checks them, since large or hostile ones take long. Nothing here knows aiohttp, and
nothing waits.
"""
