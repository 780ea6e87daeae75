"""Benchmarks of llamaslot against itself and against llama.cpp's own tools, on models that they write themselves.

Nothing here is part of the package; `python -m bench` lists what there is.
"""
