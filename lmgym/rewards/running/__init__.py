"""Rewards in processes with time limits, beside generation."""
