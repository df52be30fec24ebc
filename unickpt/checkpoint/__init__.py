"""Checkpoints: their format, where they are stored, and how ranks write, find and read them."""
