"""``torch.distributed.checkpoint`` (DCP): its state dicts as checkpoints of unickpt, and back."""
