"""The roles of a run, in separate processes: rollouter, learner, teachers."""
