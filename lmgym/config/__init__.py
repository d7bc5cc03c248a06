"""A recipe: YAML and overrides to a strict, typed tree, and back."""
