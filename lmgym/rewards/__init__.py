"""Rewards, which are also the metrics. `base` builds and calls them; one file per family."""
