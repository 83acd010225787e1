"""Compare runs: differences, intervals, plots."""
