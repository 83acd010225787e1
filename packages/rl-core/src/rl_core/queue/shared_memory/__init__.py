"""The transfer queue between processes on one host."""
