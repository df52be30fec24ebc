"""A step that is computed again: what each rank records, and what the repetitions say. ``unickpt replay-step`` asks for it.

``records``, ``judging`` and ``texts`` are pure, ``layers`` and ``recorder`` import torch.
"""
