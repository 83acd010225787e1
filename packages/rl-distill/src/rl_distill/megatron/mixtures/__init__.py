"""Mixtures of experts: the router, the dispatch of tokens to experts, and the experts."""
