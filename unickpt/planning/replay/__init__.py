"""Replay of a job's records: what a rank, a host, a link or a cause costs of a step, and what a change would gain.

Each module imports only the modules above it in this list:

    trace       calls, steps and pauses of a job on one clock, as values
    graph       chains of the hosts and transfers between them, with their durations
    microbatches  the graph of a pipeline with another number of microbatches
    programs    programs of the stages of a pipeline, and the time until they are played
    schedule    order in which the nodes of a graph can be computed, and the computation
    alike       own time of ranks between calls, and the same time of ranks with the same role
    edits       durations with a change: a rank like its peers, a link like its class
    order       durations with another order of ranks
    interleaved  gain of several chunks in each stage of a pipeline
    price       slowdown and price of every rank, host, link, stage, group and cause
    sources     traces from ring files or from the job's agent
    eviction    what a job would gain without slow ranks, for the steering
    operations  graph of a job from a table of its operations on several streams, for traces of other recorders
    stragglers  slowdown of such a job, by the definitions of ByteDance's straggler analysis
    parquet_traces  such tables from Parquet files

All modules but ``sources`` and ``parquet_traces`` are pure.
"""
