"""Numbers that are silently wrong: how they are noticed, and which rank they are of.

``nonfinite``, ``record``, ``schedule``, ``settings``, ``vote`` and ``words`` are pure, all others import torch. Adapters say
what a rank holds, and call ``watching`` before and after each step.
"""
