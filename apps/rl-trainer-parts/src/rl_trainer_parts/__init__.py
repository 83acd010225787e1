"""What the trainers share: settings, checks, run folders, and assembly; no algorithm, no command."""
