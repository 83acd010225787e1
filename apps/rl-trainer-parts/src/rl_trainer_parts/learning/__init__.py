"""The learning step that both trainers share, and the learners it uses."""
