"""Ask a finished run another question: one of its steps again, under a changed recipe."""
