"""Heartbeats, hang reports, and the socket for `status` and `scale`."""
