"""Plans for the next run: partitions of a pipeline, parallel layouts, orders of ranks.

Each module imports only the modules above it in this list:

    partition   the best cut of contiguous layers into stages, for any table of costs; the limit that binds if there is none
    links       time of a transfer by operation, members and size, fitted to records
    bits        the best bits of each weight, and the cut over devices of unlike memory
    layers      the layers of a model from those of its ranks; a cut in the words of Megatron, DeepSpeed and vLLM
    records     transfers and the time outside of layers, from the records of a job
    ranks       order of hosts or ranks
    parallel    the parallel layout
    sources     measured layers from the files of a job

All modules but ``sources`` are pure. Measured layers and their costs are in ``unickpt.diagnosis.layer_costs``.
"""
