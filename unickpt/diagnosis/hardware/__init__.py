"""What a host itself says of its hardware: the log of the kernel, NVML, counters of network cards, limits of its containers.

Every source is optional, and reading one changes nothing. From the bottom:

    events      what has happened on a host, as values, and what it bears on
    xids        what the numbers of NVIDIA's driver mean
    kernel_log  records of the kernel's log
    counters    counters and states of devices, compared with their past
    gpus        readings of GPUs, compared with those before
    sources     files of the kernel, read
    nvml        GPUs, read through NVML
    sampler     all sources of a host, read now and then
    kept        the file that the agent of a host writes

All but ``sources``, ``nvml`` and ``sampler`` are pure.
"""
