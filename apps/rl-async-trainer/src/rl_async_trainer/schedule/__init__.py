"""The schedule: which prompts start, which groups make a step; recorded, restored, replayed."""
