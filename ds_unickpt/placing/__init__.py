"""Which rank has which part of a parameter."""
