"""Where metrics go: one module for each tracker."""
