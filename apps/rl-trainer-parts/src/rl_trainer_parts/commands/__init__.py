"""Commands that both trainers share."""
