"""Attention over packed rows, on a CPU and a GPU, and the cache of keys and values."""
