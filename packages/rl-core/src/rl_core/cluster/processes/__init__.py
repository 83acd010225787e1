"""Roles as processes of this machine."""
