"""A soak: one job of 16 ranks after the other, with faults for hours. See ``__main__``."""
