"""Reward functions as other libraries have them, one file a library; ../adapters.py tells them apart. None of the
libraries is imported."""
