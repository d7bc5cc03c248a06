"""Rewards that read texts: overlap with references, form, sentiment."""
