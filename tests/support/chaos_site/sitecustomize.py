"""Imported by an interpreter at its start if this folder is on PYTHONPATH."""

import chaos_clock

chaos_clock.install()
