"""Checks of `llamaslot doctor`: each looks at one thing that a server needs, and says what to change.

None of them changes anything, but for files of a moment that measure a folder. llama.cpp runs in a process of its
own, since one that was built for another CPU or GPU may end its process.
"""
