"""``unickpt export`` of what libraries have saved: the folder for transformers has the weights of the live model.

The model is a Llama. Each library saves it by the calls of its own module beside this one.

python -m evidence.libraries.exported [--page docs/evidence/libraries.md]
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from evidence.libraries import trials
from evidence.libraries.environments import python_of
from evidence.libraries.trials import Task, Trial, Trials
from unickpt.cli.main import main as export

if TYPE_CHECKING:
    from megatron_unickpt.testing.jobs import Job
    from megatron_unickpt.testing.layouts import Layout

TITLE, FAMILY = "Weights for transformers", "llama"
TP2PP2 = "gpt-tp2pp2-fp32dist"
LIMIT = 1e-5  # of the difference of two logits in fp32
TEXT = """The model is a Llama. Megatron has it in fp32, and transformers computes its logits.

`CONFIG` is a folder with the model's `config.json`, which also names the family. It is not needed where the checkpoint or
the folder above it has this file, or a folder `huggingface` with it: SkyRL writes one, and verl with `hf_model` in
`save_contents`."""


@dataclass(frozen=True, slots=True)
class Row:
    """A checkpoint of a library.

    Attributes:
        library: name of its module.
        title: its name and version.
        trial: the job that saves.
        place: what the user names, in the folder of the library.
        truth: weights of the live model in the notes of the job. '': its logits are noted instead.
    """

    library: str
    title: str
    trial: Trial
    place: str
    truth: str = ""


ROWS = (
    Row("verl", "verl 0.9.1, Megatron", Trial(TP2PP2, ranks=(4, 1), options=("verl",)), "global_step_3/actor/model/dist_ckpt"),
    Row("ms_swift", "ms-swift 4.6.0", Trial(TP2PP2, ranks=(4, 1), options=("ms_swift",)), "checkpoint-3"),
    Row("megatron_bridge", "Megatron-Bridge 0.3.1", Trial(TP2PP2, ranks=(4, 1), options=("megatron_bridge",)), "."),
    Row("openrlhf", "OpenRLHF 0.11.2, actor", Trial("ZeRO-3 on 2"), "_actor", "_actor.pt"),
    Row("trl", "TRL 1.16.0, DPO", Trial("ZeRO-2 on 2", options=("DPO",)), "checkpoint-3", "state.pt"),
)


def _models(layout: Layout, seed: int) -> dict[str, Job]:
    from tests.jobs.journeys.megatron_job import FamilyJob

    return {"actor": FamilyJob(layout.name, FAMILY, seed=seed)}


def _save(jobs: dict[str, Job], task: Task) -> None:
    """Save by the library that the task names, and note the logits of the live model."""
    import torch

    from tests.jobs.journeys.families import rows

    (library,) = task.options
    importlib.import_module(f"evidence.libraries.{library}").save(jobs if library == "verl" else {"model": jobs["actor"]}, task)
    found = jobs["actor"].logits(rows(0)[:, :-1])  # type: ignore[attr-defined]
    if found is not None:
        torch.save(torch.tensor(found), Path(task.notes) / "logits.pt")


def _export(row: Row, folder: Path, environments: Path) -> tuple[dict[str, str], bool]:
    """Save and export. Return the row of the table, and whether it is as expected."""
    module = "exported" if not row.truth else row.library
    place, result = Trials(module, python_of(row.library, environments), folder / row.library).saved(row.trial)
    out, config = place / "hf", _configuration(row, place)
    shutil.rmtree(out, ignore_errors=True)
    named = [] if config is None else ["--config", str(config)]
    made = not result.error and not export(["export", str(place / "ck" / row.place), str(out), *named])
    outcome, passed = _compared(row, place) if made else (result.error or "**not exported**", False)
    print(row.title, outcome, flush=True)
    command = f"unickpt export {row.place if row.place != '.' else 'DIR'} OUT{' --config CONFIG' if named else ''}"
    layout = row.trial.source if row.truth else "TP2 PP2"
    return {"library": row.title, "saved under": layout, "command": f"`{command}`", "result": outcome}, passed


def _configuration(row: Row, place: Path) -> Path | None:
    """Return the folder that a user names: that of the model that a job began with. None: the checkpoint has one beside it."""
    if row.library == "trl":
        return None
    if row.truth:
        return next(place.glob("*.model"))
    from transformers import AutoConfig

    from tests.jobs.journeys.families import family_of

    AutoConfig.for_model(FAMILY, **family_of(FAMILY).huggingface).save_pretrained(place / "model")
    return place / "model"


def _compared(row: Row, place: Path) -> tuple[str, bool]:
    """Load the folder in transformers, and compare it with the live model."""
    import torch
    from transformers import AutoModelForCausalLM

    from tests.jobs.journeys.families import rows

    model = AutoModelForCausalLM.from_pretrained(place / "hf", attn_implementation="eager", dtype="auto")
    if not row.truth:
        with torch.no_grad():
            found = model(rows(0)[:, :-1]).logits
        difference = float((found - torch.load(place / "notes" / "logits.pt")).abs().max())
        return f"logits of the live model, to within {difference:.0e}", difference < LIMIT
    truth = torch.load(place / "notes" / row.truth, weights_only=False)
    live = {key.removeprefix("weight/").removeprefix("model."): value for key, value in truth.items() if "weight/" in key}
    found = {name.removeprefix("model."): value for name, value in model.state_dict().items()}
    equal = live.keys() == found.keys() and all(torch.equal(live[name], found[name]) for name in live)
    return f"{len(live)} weights of the live model, {'bit for bit' if equal else '**different**'}", equal


def main() -> int:
    return trials.main_of_rows("exported", TITLE, TEXT, ROWS, _export)


if __name__ == "__main__":
    tasks = trials.tasks_of(sys.argv)
    if tasks:
        os.environ["PYTORCH_JIT"] = "0"  # before torch is imported: TransformerEngine's names cannot be compiled
        from evidence.libraries import megatron_job

        megatron_job.run_all(tasks, _save, _save, make=_models)
    sys.exit(main())
