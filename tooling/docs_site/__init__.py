"""The documentation site: `nox -s docs` stages Markdown pages, generates those of the API, and runs Sphinx."""
