"""The trainer's schedule on a virtual clock: the same `Scheduler`, with engines and a learner that only take time."""
