"""The files and classes of RL4LMs and LlamaGym, run by lmgym."""
