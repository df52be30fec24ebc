"""Under torchrun: run every scenario of the ``scenarios_*`` modules on this world size.

scenario_worker DIR [NAME ...] [--worlds 1,2]    writes DIR/w<world>.json: {scenario: {rank: failure}}

Scenarios that skip, because this version of Megatron lacks a feature, are not in the file. ``--worlds`` may name smaller world
sizes.
"""

from __future__ import annotations

import datetime
from functools import partial
from importlib import import_module

from tests.jobs.megatron.scenarios import MODULES, REGISTRY


def main() -> None:
    import_module("megatron_unickpt.testing.jobs")  # adapts megatron to CPU before any other import of megatron
    for module in MODULES:  # before ranks fork
        import_module(f"tests.jobs.megatron.{module}")

    from unickpt.testing.launch import leave
    from tests.jobs.megatron.compared import in_a_group
    from tests.support.scenarios import arguments, run
    from tests.support.turns import in_turn

    given = arguments()
    work = partial(run, REGISTRY, given.folder, set(given.names))
    in_turn((world, partial(in_a_group, work, timeout=datetime.timedelta(seconds=60))) for world in given.worlds)
    leave()


if __name__ == "__main__":
    main()
