"""Whose training loop it is."""
