"""Jobs of 64 ranks save, and jobs of 64 and 48 ranks in other shapes load it: is every state equal, bit for bit?

    python -m evidence.sixty_four.resumes [--ranks 64] [--only zero torch ...] [--out docs/evidence/sixty-four.md]

Of each source: steps, a save, more steps. Of each pair: a job of another seed, the load, a comparison of all states with those
at the save, and steps, whose losses must be those of the source up to rounding. The models are tiny, and two cores run all
ranks, so the seconds are no measure. ``--ranks 16`` has the same layouts with a quarter of the data-parallel ranks.

``results/sixty-four.json`` keeps the rows of the parts that have run. ``--only`` runs some parts again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evidence.document import put, section
from megatron_unickpt.testing.layouts import Layout as Megatron
from tests.jobs import pairs
from tests.jobs.deepspeed.expert_names import ExpertLayout
from tests.jobs.deepspeed.megatron_names import MegatronLayout
from tests.jobs.deepspeed.zero_names import Layout as Zero
from tests.jobs.pairs import DEEPSPEED, MEGATRON, TORCH, Pairs
from tests.jobs.torch.layouts import Layout as Torch

HEAD, SECTION = "# Sixty-four ranks\n", "resumes"
KEPT = Path("results/sixty-four.json")


@dataclass(frozen=True)
class Part:
    """Pairs that one job of the worker runs.

    Attributes:
        worker, arguments: as of ``pairs.run``.
        loaded: the pairs.
        rounding: how far rounding sets losses apart.
        sizes: of model and batch (``tests.jobs.sizes``). All numbers of data-parallel ranks divide the batch.
        lazy: groups of gloo connect two ranks when these first exchange something. Megatron's experts have 37 groups in each
            rank, and connecting all ranks of each takes most of the time.
    """

    worker: str
    arguments: tuple[str, ...]
    loaded: Pairs
    rounding: pairs.Rounding = pairs.between_precisions
    sizes: dict[str, int] = field(default_factory=dict)
    lazy: bool = False


def onward(*layouts: Any) -> Pairs:
    """Return the first layout into itself, and each into the next one."""
    return [(layouts[0], layouts[0]), *zip(layouts, [*layouts[1:], layouts[0]], strict=True)]


def parts(ranks: int) -> dict[str, Part]:
    """Return the parts. ``ranks``: 64, or another multiple of 16."""
    fewer, share, batch = 3 * ranks // 4, ranks // 16, 3 * ranks
    zero = onward(Zero(1, ranks), Zero(3, fewer), Zero(3, ranks), Zero(2, fewer, "bf16"))
    mpu = onward(
        MegatronLayout(2, 4, ranks // 8, 1), MegatronLayout(1, 0, fewer, 3), MegatronLayout(4, 0, ranks // 4, 2),
    )  # fmt: skip
    experts = onward(ExpertLayout(8, ranks, 1), ExpertLayout(2, ranks, 2), ExpertLayout(3, fewer, 1))
    torch = [
        Torch.parse(f"{shape}-fp32-adamw")
        for shape in (f"hsdp{ranks // 8}x8", f"fsdp{fewer}", f"fsdp{ranks // 2}xtp2", f"ddp{fewer}")
    ]
    dense = (f"gpt-tp4pp4dp{share}-dist", f"gpt-tp2pp{ranks // 8}dp3-dist", f"gpt-dp{fewer}-dist")
    context = (f"gpt-tp2pp2cp2dp{ranks // 8}-dist", f"gpt-tp2pp2dp{fewer // 4}-dist")
    moe = (f"moe-ep4dp{ranks}-dist", f"moe-tp2ep2dp{fewer // 2}-dist")

    def megatron(*names: str, memory: bool = False) -> Part:
        sizes = {"BATCH": batch, "LAYERS": 2} if names == moe else {"BATCH": fewer, "LAYERS": 8}
        loaded = onward(*map(Megatron.parse, names))
        return Part(MEGATRON, ("--memory",) * memory, loaded, pairs.by_moved_weights, sizes, lazy=names == moe)

    return {
        "zero": Part(DEEPSPEED, ("zero",), zero, pairs.between_dtypes, {"BATCH": batch}),
        "zero-memory": Part(
            DEEPSPEED, ("zero", "--memory"), onward(Zero(1, ranks), Zero(3, fewer)), pairs.between_dtypes, {"BATCH": batch},
        ),
        "mpu": Part(DEEPSPEED, ("mpu",), mpu, sizes={"BATCH": 2 * fewer}),
        "experts": Part(
            DEEPSPEED, ("experts",), experts, sizes={"BATCH": batch, "FIRST_EXPERTS": 8, "SECOND_EXPERTS": 24},
        ),
        "torch": Part(TORCH, (), onward(*torch), pairs.between_dtypes, {"BATCH": batch}),
        "torch-asynchronous": Part(
            TORCH, ("--asynchronous",), [(torch[0], torch[1]), (torch[2], torch[0])], pairs.between_dtypes, {"BATCH": batch},
        ),
        "torch-memory": Part(
            TORCH, ("--memory",), [(torch[0], torch[0]), (torch[0], torch[1]), (torch[2], torch[0])], pairs.between_dtypes,
            {"BATCH": batch},
        ),
        "megatron": megatron(*dense),
        "megatron-memory": megatron(*dense[:2], memory=True),
        "megatron-context": megatron(*context),
        "megatron-experts": megatron(*moe),
    }  # fmt: skip


def ran(part: Part, ranks: int, folder: Path) -> list[str]:
    """Run a part. Return a row of a table for each pair."""
    env = {f"UNICKPT_TEST_{what}": str(size) for what, size in part.sizes.items()}
    env |= {"TORCH_GLOO_LAZY_INIT": "1"} if part.lazy else {}
    pairs.run(part.worker, *part.arguments, pairs=part.loaded, folder=folder, ranks=ranks, timeout_s=3 * 3600, env=env)
    problems, strayed = pairs.problems(part.loaded, folder), pairs.strayed(part.loaded, folder, part.rounding)
    rows = []
    for source, target in part.loaded:
        key = (source.name, target.name)
        far = "as uninterrupted" if key not in strayed else f"**{strayed[key]}**"
        found = problems.get(key, ())
        rows.append(f"{source.name} | {target.name} | {f'**{len(found)}**' if found else 'none'} | {far}")
        for each in found[:8]:
            print(*key, each, flush=True)
    return rows


def table(ranks: int, kept: dict[str, dict[str, Any]]) -> str:
    """Return the Markdown table of the parts that have run."""
    lines = ["| part | saved by | loaded into | tensors that differ | losses |", "|---|---|---|---|---|"]
    seconds = []
    for name in parts(ranks):
        if name in kept:
            lines += [f"| {name} | {row} |" for row in kept[name]["rows"]]
            seconds.append(f"{name} {kept[name]['seconds']}")
    return "\n".join([*lines, "", f"Seconds on two cores: {', '.join(seconds)}.", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--only", nargs="+", choices=parts(64))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    every = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    kept = every.setdefault(str(args.ranks), {})
    for name, part in parts(args.ranks).items():
        if name not in args.only if args.only else name in kept:
            continue
        begin = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            rows = ran(part, args.ranks, Path(folder))
        kept[name] = {"rows": rows, "seconds": round(time.monotonic() - begin)}
        print(*rows, f"{name}: {kept[name]['seconds']} s", sep="\n", flush=True)
        KEPT.write_text(json.dumps(every, indent=1) + "\n")
        if args.out:
            command = f"python -m evidence.sixty_four.resumes --ranks {args.ranks}"
            put(args.out, SECTION, section(SECTION, command, table(args.ranks, kept)), HEAD)


if __name__ == "__main__":
    main()
