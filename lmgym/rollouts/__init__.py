"""Prompts to scored episodes, and evaluations."""
