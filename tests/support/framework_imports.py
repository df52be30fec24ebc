"""What a job of a framework imports, for workers that are told on their command line which framework it is."""

from __future__ import annotations


def import_framework(name: str) -> None:
    """Import ``deepspeed`` or ``megatron`` as a job does, before ranks are forked."""
    if name == "deepspeed":
        from tests.support import deepspeed_imports  # noqa: F401
    else:
        from megatron_unickpt.testing import jobs  # noqa: F401  # before anything of megatron
