"""The controller carries out what the scheduler decides, by calling the roles."""
