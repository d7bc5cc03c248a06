"""Tasks: where the prompts come from. `base` loads any of them; one file per family of data sets."""
