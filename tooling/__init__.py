"""Code of the nox sessions in noxfile.py."""
