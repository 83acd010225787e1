"""A run's folder and checkpoints, and how a launch starts and stops."""
