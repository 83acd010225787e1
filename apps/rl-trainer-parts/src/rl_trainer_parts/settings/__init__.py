"""Settings: names, defaults, sources, errors and help."""
