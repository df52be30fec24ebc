"""Load, verify and compare checkpoints."""
