"""What PyTorch and DeepSpeed pickle, read without running any of it."""
