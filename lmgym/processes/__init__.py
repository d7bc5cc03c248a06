"""The pool of time-limited processes in which rewards, metrics and environments run."""
