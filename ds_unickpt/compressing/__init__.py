"""Compressed gradients in DeepSpeed."""
