"""llama.cpp through llama-cpp-python's low-level API: the only package that imports llama_cpp.

It must never make a call on which llama.cpp aborts the process: ids, ranges and capabilities are checked before.
`docs/llama-cpp.md` has the facts about llama.cpp on which the code depends.
"""

from llamaslot.backend.llama.llama_backend import LlamaBackend
from llamaslot.backend.llama.loading import CACHE_TYPES, LlamaSettings, LoadingStopped
from llamaslot.backend.llama.vocab import LlamaVocab

__all__ = ["CACHE_TYPES", "LlamaBackend", "LlamaSettings", "LlamaVocab", "LoadingStopped"]
