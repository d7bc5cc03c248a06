"""Rewards for problems with a final answer."""
