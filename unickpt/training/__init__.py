"""What acts inside a training step: compressed gradients, precision of layers, order of samples."""
