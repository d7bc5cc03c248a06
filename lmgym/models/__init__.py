"""Policies: loading, log-probabilities, value functions, adapters, quantization, export."""
