"""What DeepSpeed imports and loads when a job starts and steps. A worker imports this module before it forks ranks.

1,471 modules, which take 3 seconds of a processor, and the operators of DeepSpeed for CPU. Before DeepSpeed loads an operator,
and for each optimizer on the CPU, it asks for the properties of the processor, in a process of its own that takes a second. In
the parent this happens once, and not in each rank of each job.
"""

import functools

import cpuinfo
import setuptools  # noqa: F401
import torch._dynamo
import torch._inductor.compile_fx  # noqa: F401
from deepspeed.accelerator import get_accelerator

cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
if get_accelerator().device_name() == "cpu":
    cpuinfo.get_cpu_info()
    for name in ("ShareMemCommBuilder", "CPUAdamBuilder"):
        builder = get_accelerator().create_op_builder(name)
        if builder is not None:
            builder.load(verbose=False)
