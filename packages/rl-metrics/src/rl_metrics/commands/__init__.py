"""The verbs of the command `rl-metrics`, a file each with `add_to(verbs)`."""
