"""Several equal engines as one."""
