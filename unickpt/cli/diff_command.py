"""``unickpt diff``: compare two checkpoints, also of different frameworks."""

from __future__ import annotations

import argparse
import dataclasses

from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.load.diff import Difference, differences
from unickpt.cli.exit_codes import DAMAGED, SOUND
from unickpt.cli.locate import locate_checkpoint
from unickpt.cli.output import Output
from unickpt.transform.dialects.hf_layouts import in_memory
from unickpt.transform.dialects.translated_checkpoint import under_names_of

JSON_SCHEMA = 1


def run(args: argparse.Namespace, out: Output) -> int:
    """Compare and print. Return 0 if all tensors are equal, 1 if some differ."""
    first, second = (in_memory(Checkpoint.open(locate_checkpoint(each))) for each in (args.first, args.second))
    second = under_names_of(second, first, chosen=args.dialect, option="--dialect")
    found = list(differences(first, second))
    found += [
        Difference(name, "", reason="only in the second, and the first has no counterpart") for name in second.untranslated
    ]
    wrong = [each for each in found if not each.equal]
    if args.json:
        out.json({"schema": JSON_SCHEMA, "equal": not wrong, "tensors": [dataclasses.asdict(each) for each in found]})
        return DAMAGED if wrong else SOUND
    shown = found if args.all else wrong
    if shown:
        columns = ("tensor", "state", "differ", "of", "largest", "relative", "")
        out.table(f"{first.storage} and {second.storage}", columns, [_row(each) for each in shown])
        out.line()
    if wrong:
        out.line(f"{len(wrong):,} of {len(found):,} tensors differ", style="bold red")
    else:
        out.line(f"equal: {len(found):,} tensors, bit for bit", style="bold green")
    return DAMAGED if wrong else SOUND


def _row(each: Difference) -> tuple[object, ...]:
    if each.reason:
        return each.name, each.state, "", "", "", "", each.reason
    return each.name, each.state, each.elements, each.of, f"{each.largest:.3g}", f"{each.relative:.3g}", ""
