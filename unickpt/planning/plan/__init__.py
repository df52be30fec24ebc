"""Plans for the next run: partitions of a pipeline, parallel layouts, orders of ranks.

All modules but ``sources`` are pure. Measured layers and their costs are in ``unickpt.diagnosis.layer_costs``.
"""
