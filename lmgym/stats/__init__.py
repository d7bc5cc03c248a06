"""Intervals and paired tests. Numpy only."""
