"""Training: the loop, callbacks, checkpoints, run folders, and the drop-in for people with their own loop."""
