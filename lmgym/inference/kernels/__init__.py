"""Faster ways to compute one decoding step."""
