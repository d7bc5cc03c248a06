"""Answers sampled by vLLM, here or on servers."""
