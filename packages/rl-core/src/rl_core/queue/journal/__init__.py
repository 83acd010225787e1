"""The queue's journal on disk, and its inspection."""
