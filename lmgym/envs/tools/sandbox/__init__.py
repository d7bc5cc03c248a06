"""A model's Python snippet in a process of its own, within limits."""
