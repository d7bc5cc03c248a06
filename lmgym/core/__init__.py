"""What every other part stands on: errors, seeds, the registry and its table. No torch."""
