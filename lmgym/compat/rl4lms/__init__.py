"""RL4LMs' files and classes as they are: its YAML configurations become lmgym recipes (`convert`), and classes written
for its registries become lmgym's tasks and rewards.

`lmgym train config.yml` recognises such a file, `lmgym convert rl4lms config.yml` prints the recipe, and `python -m
lmgym.compat.rl4lms` takes RL4LMs' own flags. docs/rl4lms.md has the table of every key.
"""
