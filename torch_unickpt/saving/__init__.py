"""From a training to a checkpoint."""
