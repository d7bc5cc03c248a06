"""What all other packages use: errors, seeds, the registry and the table of built-ins. No torch."""
