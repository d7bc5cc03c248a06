"""A rollout cut into units, which several processes compute."""
