"""Whether this machine can run a trainer: what is read of it, what settings need, and what is wrong."""
