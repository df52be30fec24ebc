"""What a rank holds of named global tensors: described for a save, filled by a load. Adapters and the public API share it."""
