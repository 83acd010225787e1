"""The files in a run's folder: appended during the run, read afterwards."""
