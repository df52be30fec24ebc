"""The end of a training that is told to end: all ranks save at one step boundary, and end with one exit code."""
