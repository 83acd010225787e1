"""Importers of other trainers' files as runs."""
