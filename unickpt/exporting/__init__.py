"""Checkpoints of ours in the form of others, written one block after the other."""

from unickpt.exporting.huggingface import CONFIG, INDEX, SINGLE, WEIGHTS, Exported, as_huggingface, export

__all__ = ["CONFIG", "INDEX", "SINGLE", "WEIGHTS", "Exported", "as_huggingface", "export"]
