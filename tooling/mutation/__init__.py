"""Mutation tests: change the code at random and see whether a test notices; see docs/decisions/0075."""
