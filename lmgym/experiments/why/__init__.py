"""`lmgym why`: which training steps and which groups of them moved a held-out answer."""
