"""The documentation site: `nox -s docs` stages Markdown pages, generates the API pages, and runs Sphinx."""
