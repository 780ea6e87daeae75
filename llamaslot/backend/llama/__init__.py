"""llama.cpp through llama-cpp-python's low-level API: the only package that imports llama_cpp.

It must never let through a call over which llama.cpp aborts the process: ids, ranges and capabilities are checked
here, before ctypes. Facts about llama.cpp that the code stands on are in `docs/llama-cpp.md`.
"""

from llamaslot.backend.llama.llama_backend import LlamaBackend
from llamaslot.backend.llama.llama_settings import CACHE_TYPES, LlamaSettings
from llamaslot.backend.llama.loading import LoadingStopped
from llamaslot.backend.llama.vocab import LlamaVocab

__all__ = ["CACHE_TYPES", "LlamaBackend", "LlamaSettings", "LlamaVocab", "LoadingStopped"]
