"""A launch of a run: its folder, checkpoints, and how it stops."""
