"""Simulated jobs of any size with one fault, as input of the detectors. The same seed gives the same job.

layout      ranks and communicators
calls       calls of a training step, played until no rank can continue
steps       durations of steps and transfers
faults      jobs with one fault, and the expected verdict

Example:
    >>> from unickpt.testing.simulation.faults import JobFault, diagnosed, right_place, simulate
    >>> from unickpt.testing.simulation.layout import ParallelLayout
    >>> scene = simulate(ParallelLayout(tp=2, pp=4, dp=8), JobFault.STOPPED, seed=1)
    >>> right_place(diagnosed(scene), scene.expected)
    True
"""
