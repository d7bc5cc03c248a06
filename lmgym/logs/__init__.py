"""Records of a run (writer), its display on the terminal (console) and its plots (plots). No torch."""
