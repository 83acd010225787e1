"""Supervised training of a policy on demonstrations, with the learner, ranks and run folder of the trainers."""
