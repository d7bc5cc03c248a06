"""What a resumed run may change, and how lmgym tells that something has changed."""
