"""The transfer queue between processes of one host."""
