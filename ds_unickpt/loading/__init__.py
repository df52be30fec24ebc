"""From a checkpoint back into an engine."""
