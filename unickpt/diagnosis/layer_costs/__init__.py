"""Times of layers: measured ones, their prediction at another size or on another device, and those of earlier jobs.

All modules but ``store`` are pure. ``planning.plan`` makes plans of them, and the agent of a host compares its ranks with them.
"""
