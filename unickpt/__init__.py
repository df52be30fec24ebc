"""unickpt: universal checkpoints for DeepSpeed and Megatron.

This package is the framework-free core: the format, the layout algebra, planning and I/O.
It never imports ``deepspeed`` or ``megatron``; the adapters ``ds_unickpt`` and
``megatron_unickpt`` depend on it, never the other way round.

Importing ``unickpt`` itself imports nothing but the standard library. What runs inside every ``import torch`` is not in
here, but in the module ``_unickpt_autoload`` beside the package.
"""

__version__ = "0.1.0"
