"""More than one run: comparing two models, several seeds, sweeps over settings, and tables of what they came to."""
