"""Metrics, trackers, health and reports of a run in progress."""
