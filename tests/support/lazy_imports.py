"""What PyTorch and DeepSpeed import at the first step of an optimizer. A worker imports this module before it forks ranks.

1,471 modules, which take 3 seconds of a processor: in the parent they are imported once, and not once in each rank of each job.
"""

import setuptools  # noqa: F401
import torch._dynamo
import torch._inductor.compile_fx  # noqa: F401
