"""What an interpreter imports as it starts, where this folder is on PYTHONPATH."""

import chaos_clock

chaos_clock.install()
