"""Compare runs: differences with confidence intervals, and trends."""
