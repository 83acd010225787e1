"""A training service for programs that are written for the Tinker API."""
