"""Runs that hang: what every role did, who waited for whom, and why nothing happens."""
