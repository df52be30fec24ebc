"""Timing of collectives and layers, and precision of layers."""
