"""Checkpoint managers of libraries that do not save through torch's DCP."""
