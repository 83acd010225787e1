"""The queue's journal on disk, and the commands that read it."""
