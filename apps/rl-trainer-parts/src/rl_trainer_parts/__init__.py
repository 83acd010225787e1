"""Shared parts of the trainers: settings, checks, run folders and assembly. No algorithm, no command."""
