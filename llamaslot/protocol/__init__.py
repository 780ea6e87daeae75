"""From the bodies of requests to `Submit` commands, without HTTP.

The prompt worker decodes and checks them, since large or hostile ones take long. Nothing here knows aiohttp, and
nothing waits.
"""
