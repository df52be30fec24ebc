"""What this rank holds: names, partitions, states of the optimizer."""
