"""What this rank holds: sharded tensors, states of the optimizer, generators."""
