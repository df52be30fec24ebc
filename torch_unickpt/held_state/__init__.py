"""What a rank holds: names, states of optimizers, further objects; as a ``Description``."""
