"""What tests and benchmarks of runs' records share."""
