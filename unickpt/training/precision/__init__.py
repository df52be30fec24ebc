"""Layers that compute in another dtype than the job, on some ranks (QSync, arXiv 2407.02327).

``policy`` is pure. ``regions`` and ``apply`` import torch. ``unickpt plan precision`` makes the file. The adapters apply it.
"""
