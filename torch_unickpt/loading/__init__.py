"""From a checkpoint to a training."""
