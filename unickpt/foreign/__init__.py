"""Checkpoints that others have written, as sources of ours. Nothing here imports a framework, and nothing runs their code."""
