"""Settings: their names and defaults, where they are read from, errors and help."""
