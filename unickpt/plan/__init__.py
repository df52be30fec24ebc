"""Plans for the next run: partitions of a pipeline, parallel layouts, orders of ranks.

Each module imports only the modules above it in this list:

    partition   the best cut of contiguous layers into stages, for any table of costs; the limit that binds if there is none
    bits        the best bits of each weight, and the cut over devices of unlike memory
    layers      measured layers; a cut as arguments of Megatron, parts of DeepSpeed, and a variable of vLLM
    sources     measured layers from the files of a job

All modules but ``sources`` are pure.
"""
