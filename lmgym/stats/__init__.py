"""Statistics: confidence intervals and paired tests. Needs numpy only."""
