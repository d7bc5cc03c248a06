"""More than one run: comparisons of two models, several seeds, sweeps over settings, and tables of the results."""
