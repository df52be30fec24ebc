"""A host that computes wrongly is out, and the job goes on from a state before its first wrong step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs.steering.sick_hosts import Sickness, equal, sound, with_sick_host
from tests.jobs.steering.witness_worker import STEPS
from tests.support.extent import some

CASES = {  # and the step after which the sound job starts again
    "torch": (Sickness("n2", 7, STEPS, "activation"), "SDC_COMPUTE", 6),
    "megatron": (Sickness("n2", 7, STEPS, "activation"), "SDC_COMPUTE", 0),
    "deepspeed": (Sickness("n2", 7, STEPS, "activation"), "SDC_COMPUTE", 0),
}


@pytest.mark.parametrize("framework", some([*CASES], 1))
def test_a_host_that_computes_wrongly_is_out_and_leaves_no_trace(framework: str, tmp_path: Path) -> None:
    """n2 is sick from step 7 on. The check of step 8 finds it, and a spare takes its place from step 6 on."""
    sick, verdict, at = CASES[framework]
    found = with_sick_host(tmp_path, framework, sick)
    assert found.parked == (("n2", verdict),), found.text
    assert found.starts == (0, 6), found.text
    (fault,) = found.faults
    assert (fault.after, fault.found, fault.gone_back) == (6, 8, True)
    (tmp_path / "sound").mkdir()
    assert equal(found.final, sound(tmp_path / "sound", framework, at))
