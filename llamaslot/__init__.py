"""llamaslot: serve GGUF models over HTTP without computing the same prefix twice."""

__version__ = "0.1.0"
