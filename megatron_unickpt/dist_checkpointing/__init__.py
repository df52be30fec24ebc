"""Behind Megatron's ``dist_checkpointing``: saves, loads, strategies."""
