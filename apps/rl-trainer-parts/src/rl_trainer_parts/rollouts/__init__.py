"""Problems, engines, skip caches and validation of a run."""
