"""Names of the module ``_unickpt_autoload``, which arms the import hooks of the frameworks."""

import os
import sys

try:
    import _unickpt_autoload
except ModuleNotFoundError:  # an editable installation that is older than this module
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    try:
        import _unickpt_autoload
    finally:
        sys.path.pop()

DEEPSPEED, MEGATRON, TORCH = _unickpt_autoload.DEEPSPEED, _unickpt_autoload.MEGATRON, _unickpt_autoload.TORCH
arm, asked = _unickpt_autoload.arm, _unickpt_autoload.asked
watch, unwatch = _unickpt_autoload.watch, _unickpt_autoload.unwatch
