"""RL4LMs' files and classes, unchanged: `convert` turns its YAML configurations into lmgym recipes, and adapters turn
classes written for its registries into lmgym's tasks and rewards.

`lmgym train config.yml` recognises such a file, `lmgym convert rl4lms config.yml` prints the recipe, and `python -m
lmgym.compat.rl4lms` takes RL4LMs' own flags. docs/rl4lms.md has the table of every key."""
