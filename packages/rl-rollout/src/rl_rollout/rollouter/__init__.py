"""The rollouter: engines, agent loop and rewards as a role that puts whole groups into a queue."""
