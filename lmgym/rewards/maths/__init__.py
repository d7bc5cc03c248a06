"""Rewards for maths problems with a final answer."""
