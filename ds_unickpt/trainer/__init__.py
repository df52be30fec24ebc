"""Inside Hugging Face Trainer and Accelerate."""
