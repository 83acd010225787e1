"""Attention over packed trajectories: layouts, their kernels, shared prefixes, and rotary positions."""
