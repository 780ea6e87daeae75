"""llama.cpp through llama-cpp-python's low-level API: the only package that imports llama_cpp.

It must never make a call on which llama.cpp aborts the process: ids, ranges and capabilities are checked before.
`docs/llama-cpp.md` has the facts about llama.cpp on which the code depends.
"""

import sys
from types import ModuleType

if "llama_cpp" not in sys.modules:
    # Leave out its high-level API, which it always imports: with what that needs, it takes 20 ms of each start.
    sys.modules["llama_cpp.llama"] = ModuleType("llama_cpp.llama")
    import llama_cpp  # noqa: F401

    del sys.modules["llama_cpp.llama"]

from llamaslot.backend.llama.llama_backend import LlamaBackend
from llamaslot.backend.llama.loading import CACHE_TYPES, LlamaSettings, LoadingStopped
from llamaslot.backend.llama.vocab import LlamaVocab

__all__ = ["CACHE_TYPES", "LlamaBackend", "LlamaSettings", "LlamaVocab", "LoadingStopped"]
