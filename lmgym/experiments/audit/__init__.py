"""`lmgym audit`: what a reward pays for, tried on answers that are right, wrong, or made to trick it."""
