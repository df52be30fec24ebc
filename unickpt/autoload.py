"""What waits for the frameworks, by the name that it has inside of the package; see ``_unickpt_autoload``."""

from _unickpt_autoload import DEEPSPEED, MEGATRON, arm, watch

__all__ = ["DEEPSPEED", "MEGATRON", "arm", "watch"]
