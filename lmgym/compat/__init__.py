"""Other systems' own interfaces, over lmgym's parts."""
