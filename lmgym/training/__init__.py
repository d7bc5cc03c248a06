"""One run: set-up, the loop, checkpoints, evaluations."""
