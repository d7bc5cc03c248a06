"""Configurations of TRL, open-r1, verl, OpenRLHF and NeMo RL as recipes: files are read as text, never run."""
