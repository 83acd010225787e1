"""A model's shape, parameters, memory and FLOPs, computed from config.json and the parallel layout without torch."""
