"""Mixtures of experts: the router, the way of tokens to their experts, the experts themselves."""
