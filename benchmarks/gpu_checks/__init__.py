"""Everything that only a GPU can show, in one command.

    python -m benchmarks.gpu_checks [--dry] [--only GROUP ...] [--minutes 9] [--out FILE.json]
        [--page FILE.md]

rows        one check and its result
place       the device that the checks run on, or the CPU in a dry run
ranks       ranks of a job as forked processes, several of which may share one GPU
staging     copies behind training, loads into device tensors
timing      times of calls beside the profiler's, cost
witness     hashes, their cost, and operators that repeat
faults      hanging and slow ranks, and what is said of them
zero        DeepSpeed: save, load at another stage and world, beside its own save and DCP
megatron    the same with Megatron
"""
