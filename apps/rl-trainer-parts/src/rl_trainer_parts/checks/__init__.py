"""Checks of the settings before models load."""
