"""The numbers of every token of some answers, as files."""
