"""Checkpoints made of checkpoints: converted, renamed, edited, grown and rounded."""
