"""The documentation site: `nox -s docs` stages the repository's pages, generates the API's, and has Sphinx build them."""
