"""Inside Megatron's training scripts: arguments, tracker file, schedule."""
