"""Attention over packed trajectories: layouts, kernels for each, shared prefixes, rotary positions."""
