"""Compression of gradients with error feedback, whose residuals survive a restart.

``settings``, ``schemes``, ``powersgd``, ``carried`` and ``sizes`` are pure. The package imports torch, and
``advisor`` imports ``unickpt.planning.replay``.
"""
