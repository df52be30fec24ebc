"""The programs of ``unickpt.planning.replay.programs`` against DeepSpeed's own schedule."""

from __future__ import annotations

import pytest
from deepspeed.runtime.pipe import schedule as ds

from unickpt.planning.replay.programs import PipelineSchedule, StageMessage, Work, program


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 8])
def test_deepspeeds_program_is_that_of_its_schedule(stages: int, microbatches: int) -> None:
    for stage in range(stages):
        expected: list[StageMessage | Work] = []
        counts: dict[str, int] = {}
        for commands in ds.TrainSchedule(microbatches, stages, stage).steps():
            for command in commands:
                name = type(command).__name__
                at = counts.get(name, 0)
                counts[name] = at + 1
                if name in ("ForwardPass", "BackwardPass"):
                    expected.append(Work(name == "BackwardPass", 0, at))
                elif name in ("SendGrad", "RecvGrad", "SendActivation", "RecvActivation"):
                    source = stage if name.startswith("Send") else stage + (1 if name == "RecvGrad" else -1)
                    expected.append(StageMessage(name.endswith("Grad"), source, at))
        found: list[StageMessage | Work] = []
        for item in program(stage, stages, microbatches, PipelineSchedule.DEEPSPEED):
            assert len(item.messages) <= 1
            found += [*item.messages, *([item.work] if item.work is not None else [])]
        assert found == expected
