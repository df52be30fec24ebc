"""From an engine to the shards of a save."""
