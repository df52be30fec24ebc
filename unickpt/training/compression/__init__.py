"""Compression of gradients with error feedback, whose residuals survive a restart.

Each module imports only the modules below it in this list:

    ddp          communication hook of ``DistributedDataParallel``
    torch_powersgd  residuals of torch's own PowerSGD hook, by parameter name
    advisor      which buckets of gradients pay for which scheme, by the replay of a job's records
    exchange     mean of gradients over a process group, in compressed form
    wire         the two collectives of an exchange
    sizes        bytes that a rank sends
    carried      residuals as values: of one rank, and for another number of ranks
    powersgd     low-rank factors of matrices
    schemes      codecs: rows of numbers to bytes and back
    settings     what a job asks for

``settings``, ``schemes``, ``powersgd``, ``carried`` and ``sizes`` are pure. The package imports torch, and
``advisor`` imports ``unickpt.planning.replay``.
"""
