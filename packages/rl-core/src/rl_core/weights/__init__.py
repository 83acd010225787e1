"""Weights from a learner to engines, with proof that they arrived."""
