"""`lmgym view`: a page over the records of runs, served on this machine or written as one file. It imports no torch."""
