"""Reuse by kind of model: sliding windows, recurrent states, hybrids and MLA, beside llama-server's checkpoints."""
