"""Checks of links between hosts."""
