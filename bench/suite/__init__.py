"""llama-server's own test suite, run against llamaslot: `make bench ARGS=llama-suite`.

The suite is read from llama.cpp's source, as it comes with llama-cpp-python, and is not changed. It starts the
program in LLAMA_SERVER_BIN_PATH for each test: here `start.py`, which swaps the model for a file with random
weights and starts llamaslot, or llama-server itself, whose results say which tests such a model can pass.
`plugin.py` is loaded into the suite's pytest.
"""
