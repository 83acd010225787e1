"""The verbs of the command `rl-metrics`, one file each with `add_to(add_verb)`."""
