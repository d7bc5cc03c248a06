"""Faster ways to compute the same: heads in chunks, matrix products of CPUs."""
