"""Position in the training data, independent of the number of ranks."""
