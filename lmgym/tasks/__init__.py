"""Tasks: datasets as lists of Examples (prompt, references, meta). `base` loads any of them; one file per family."""
