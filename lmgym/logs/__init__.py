"""What a run writes down (writer), shows while it runs (console) and draws at its end (plots). No torch."""
