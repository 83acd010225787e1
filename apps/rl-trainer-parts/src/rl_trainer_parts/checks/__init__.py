"""Checks of the settings that run before models load."""
