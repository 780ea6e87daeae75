"""The SDKs' own tests of endpoints, which their authors run against a mock server, run against llamaslot.

They come with the source package of the installed SDK and are not changed. The mock server knows any id that a
request names: `plugin.py` puts ids that exist in their place. `exceptions.py` has what fails, and why.
"""
