"""Batch size and steps of a job with another number of ranks."""
