"""The transfer queue across hosts, on Ray."""
