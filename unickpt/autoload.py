"""What waits for the frameworks, by the name that it has inside of the package; see ``_unickpt_autoload``."""

import os
import sys

try:
    import _unickpt_autoload
except ModuleNotFoundError:  # an editable installation made before there was this module does not know it
    sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    try:
        import _unickpt_autoload
    finally:
        sys.path.pop()

DEEPSPEED, MEGATRON = _unickpt_autoload.DEEPSPEED, _unickpt_autoload.MEGATRON
arm, watch = _unickpt_autoload.arm, _unickpt_autoload.watch
