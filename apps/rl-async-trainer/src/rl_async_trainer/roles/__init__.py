"""Roles that run in processes of their own: rollouter, learner, teachers."""
