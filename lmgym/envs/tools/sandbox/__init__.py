"""Runs a model's Python code in a separate process, within limits."""
