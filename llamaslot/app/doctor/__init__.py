"""Checks of `llamaslot doctor`: each examines one thing that a server needs and advises what to change.

The checks change nothing, except that they write temporary files to measure a folder's speed. llama.cpp is loaded
in a separate process, because a build for another CPU or GPU may crash it.
"""
