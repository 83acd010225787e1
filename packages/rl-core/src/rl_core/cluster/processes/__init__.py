"""Roles as processes on this machine."""
