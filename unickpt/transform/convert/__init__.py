"""Conversion from and to checkpoint formats of other programs. No framework is imported, and no code of a checkpoint runs."""
