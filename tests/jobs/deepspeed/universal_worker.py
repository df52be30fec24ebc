"""Under torchrun: universal checkpoints that DeepSpeed itself creates and loads.

universal_worker save DIR     of every source: DIR/<layout>/own, DIR/<layout>/native, DIR/<layout>/universal (which DeepSpeed's
                              own script makes of the native one), DIR/<layout>.truth, DIR/<layout>.json (losses)
universal_worker load DIR     every DIR/<layout>/exported into engines of every stage, on every world size up to this one:
                              DIR/loaded-w<world>.json; what DeepSpeed's loading does of its own accord: DIR/details.json
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.checkpoint import ds_to_universal

from tests.jobs.deepspeed.jobs import Layout, build, config, in_a_group, scramble, train
from tests.jobs.deepspeed.parallel_jobs import STATES
from tests.jobs.deepspeed.truth import comparable, consolidated, differences, optimizer_of
from tests.support.turns import in_turn
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.testing.launch import leave
from unickpt.transform.convert.deepspeed.universal_writer import export

STEPS_BEFORE, STEPS_AFTER = 3, 3
UNTRAINED = ("weight/positions.weight", "buffer/")  # state that DeepSpeed's universal loading does not change
KINDS = ("universal", "exported")
SOURCES = (Layout(1, 2, "bf16o"), Layout(2, 2, "fp32"), Layout(3, 2, "bf16"))


def pairs(world: int) -> list[tuple[Layout, Layout]]:
    """Return targets of every stage and precision, each with a source. On three ranks, every target with every source."""
    targets = [Layout(stage, world, precision) for stage in (1, 2, 3) for precision in ("fp32", "bf16")]
    targets.append(Layout(1, world, "bf16o"))
    return [(layout, SOURCES[(at + world) % len(SOURCES)]) for at, layout in enumerate(targets)]


def save(folder: Path) -> None:
    for layout in SOURCES:
        at = folder / layout.name
        for kind in ("native", "own"):
            engine = build(layout, seed=1, unickpt={"enabled": kind == "own", "async_save": False})
            before = train(engine, STEPS_BEFORE)
            engine.save_checkpoint(str(at / kind), client_state={"note": layout.name})
            if kind == "own":
                truth = consolidated(engine, STATES)
                losses = before + train(engine, STEPS_AFTER)
            engine.destroy()
        if dist.get_rank() == 0:
            torch.save(truth, folder / f"{layout.name}.truth")
            (folder / f"{layout.name}.json").write_text(json.dumps(losses))
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                ds_to_universal.main(
                    argparse.Namespace(
                        input_folder=str(at / "native" / f"global_step{STEPS_BEFORE}"),
                        output_folder=str(at / "universal" / f"global_step{STEPS_BEFORE}_universal"),
                        num_extract_workers=1, num_merge_workers=1, keep_temp_folder=False, strict=True,
                        inject_missing_state=True,
                    )
                )  # fmt: skip
        dist.barrier()


def load(folder: Path) -> None:
    results: list[dict[str, Any]] = []
    for layout, source in pairs(dist.get_world_size()):
        engine = _engine(layout, 20, sub_group_size=10**9)
        scramble(engine)
        exported = folder / source.name / "exported"
        where, client = engine.load_checkpoint(str(exported))
        truth = torch.load(folder / f"{source.name}.truth", weights_only=False)
        expected, found = comparable(truth, consolidated(engine, STATES), source, layout)
        untrained = [key for key in expected if key.startswith(UNTRAINED)]
        left = [key for key in untrained if differences({key: expected[key]}, {key: found[key]})]
        problems = differences(expected, found, ignore=UNTRAINED)
        if where is None or client["note"] != source.name:
            problems.append(f"returned {where}, {client}")
        _load_untrained(engine, exported)
        problems += differences(*comparable(truth, consolidated(engine, STATES), source, layout))
        losses = train(engine, STEPS_AFTER)
        moved = []
        for seed in (1, 2):
            engine.load_checkpoint(str(exported))
            _load_untrained(engine, exported)
            moved.append(train(engine, STEPS_AFTER, moved=seed))
        results.append({
            "source": source.name, "target": layout.name, "problems": problems, "left": left, "losses": losses, "moved": moved,
        })  # fmt: skip
        engine.destroy()
    if dist.get_rank() == 0:
        (folder / f"loaded-w{dist.get_world_size()}.json").write_text(json.dumps(results))


def _engine(layout: Layout, seed: int, *, sub_group_size: int, **more: Any) -> Any:
    zero = {**config(layout)["zero_optimization"], "sub_group_size": sub_group_size}
    return build(
        layout, seed=seed, zero_optimization=zero, unickpt={"enabled": False}, checkpoint={"load_universal": True}, **more
    )


def _load_untrained(engine: Any, folder: Path) -> None:
    """Load the frozen state, which DeepSpeed's universal loading does not change (docs/guides/conversion-deepspeed.md)."""
    tag = (folder / "latest_universal").read_text()
    found = torch.load(folder / tag / "mp_rank_00_model_states.pt", weights_only=False)["module"]
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0, enabled=hasattr(parameter, "ds_id")):
                parameter.data.copy_(found[name])
    for name, buffer in engine.module.named_buffers():
        if name in found:
            buffer.copy_(found[name])


def details(folder: Path) -> None:
    """Record DeepSpeed's own behaviour on one rank: DIR/details.json."""
    found: dict[str, Any] = {"steps": {kind: _steps_of_sub_groups(folder / SOURCES[2].name / kind) for kind in KINDS}}
    found["steps"]["cloned"] = _steps_of_sub_groups(folder / SOURCES[2].name / "exported", clone=True)
    # of ZeRO-3, whose accessors know the states of all groups at once
    engine = build(Layout(3, 1), seed=4, parameters=decayed, unickpt={"enabled": True, "async_save": False})
    train(engine, STEPS_BEFORE)
    engine.save_checkpoint(str(folder / "groups" / "own"))
    truth = consolidated(engine, STATES)
    engine.destroy()
    own = folder / "groups" / "own" / f"global_step{STEPS_BEFORE}"
    found["notes"] = export(Checkpoint.open(own), folder / "groups" / "exported").notes
    for name, stage, parameters in (("same", 2, decayed), ("more", 2, decayed_in_three), ("zero3", 3, decayed)):
        engine = _engine(Layout(stage, 1), 30, sub_group_size=10**9, parameters=parameters)
        engine.load_checkpoint(str(folder / "groups" / "exported"))
        loaded = consolidated(engine, STATES)
        found[name] = differences(truth, loaded, ignore=(*UNTRAINED, "groups"))
        found[f"{name}: decay"] = [(group["weight_decay"], group["lr"]) for group in loaded["groups"]]
        engine.destroy()
    found["decay"] = [(group["weight_decay"], group["lr"]) for group in truth["groups"]]
    (folder / "details.json").write_text(json.dumps(found))


def _steps_of_sub_groups(folder: Path, *, clone: bool = False) -> list[float]:
    """Of an optimizer of torch under ZeRO-3 with several sub-groups, one step after a load."""
    engine = _engine(Layout(3, 1, "bf16"), 7, sub_group_size=1500)
    engine.load_checkpoint(str(folder))
    for state in optimizer_of(engine).state.values() if clone else ():
        state["step"] = state["step"].clone()
    train(engine, 1)
    steps = sorted({float(state["step"]) for state in optimizer_of(engine).state.values()})
    engine.destroy()
    return steps


def decayed(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Return two groups, as in most jobs: matrices with weight decay, the rest without."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if len(_shape(p)) > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if len(_shape(p)) <= 1], "weight_decay": 0.0},
    ]


def decayed_in_three(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Return the same groups, with the second one divided in two."""
    first, second = decayed(model)
    return [first, {**second, "params": second["params"][:3]}, {**second, "params": second["params"][3:]}]


def _shape(parameter: torch.nn.Parameter) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def main() -> None:
    kind, folder, world = sys.argv[1], Path(sys.argv[2]), int(os.environ["WORLD_SIZE"])
    jobs = [(world, save)] if kind == "save" else [(1, details), *((n, load) for n in range(1, world + 1))]
    in_turn((n, partial(in_a_group, partial(job, folder))) for n, job in jobs)
    leave()


if __name__ == "__main__":
    main()
