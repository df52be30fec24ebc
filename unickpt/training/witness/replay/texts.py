"""Texts of what the repetitions of a step say, made last."""

from __future__ import annotations

from unickpt.training.witness.replay.judging import Against, Judgement, Meaning, Place, RankDifferences
from unickpt.training.witness.replay.records import Phase
from unickpt.training.witness.words import who

_SHOWN = 8  # ranks
_NAMES = {
    Phase.INPUT: "{what}",
    Phase.OUTPUT: "the output of {what}",
    Phase.OUTPUT_GRADIENT: "the gradient of the output of {what}",
    Phase.GRADIENT: "the gradient of {what}",
    Phase.REDUCED: "the gradient of {what} as the optimizer uses it",
    Phase.HELD: "{what}",
    Phase.BUFFER: "buffer {what}",
    Phase.RANDOM: "{what}",
}
_COUNTED = {
    Phase.INPUT: "inputs",
    Phase.OUTPUT: "outputs of layers",
    Phase.OUTPUT_GRADIENT: "gradients of these outputs",
    Phase.GRADIENT: "gradients of parameters before reduction",
    Phase.REDUCED: "gradients of parameters as the optimizer uses them",
    Phase.HELD: "weights, masters and states",
    Phase.BUFFER: "buffers",
    Phase.RANDOM: "random states",
}


def heading(found: Judgement) -> str:
    """Return one sentence."""
    steps = f"step {found.step + 1}" if found.until == found.step + 1 else f"steps {found.step + 1} to {found.until}"
    each = f"{steps}, computed {found.runs} times from the checkpoint of step {found.step} on {_ranks(found.world)}"
    if found.meaning is Meaning.EQUAL:
        same = f" They are those of the checkpoint of step {found.until}, too." if found.against.equal else ""
        return f"EQUAL: {each}: all {found.values:,} values have equal bits.{same}"
    if found.meaning is Meaning.ORIGINAL:
        others = f"and the checkpoint of step {found.until} has others"
        return f"ORIGINAL: {each}: all {found.values:,} values have equal bits, {others}"
    origin = [each for each in found.ranks if each.rank in found.origin]
    first = min(origin, key=lambda each: (each.first.micro_batch, each.position))
    them = who(tuple(each.rank for each in origin[:_SHOWN]), tuple(each.host for each in origin[:_SHOWN]))
    more = f" and {len(origin) - _SHOWN:,} other ranks" if len(origin) > _SHOWN else ""
    every = "all ranks" if len(origin) == found.world > 1 else f"{them}{more}"
    loaded = first.first.step == found.step
    what = f"{_what(first.first)}{', as it was loaded,' * loaded}"
    return f"{found.meaning.value} {_when(first.first)}: {every}: {what} differs between the runs"


def details(found: Judgement) -> list[str]:
    """Return what differs on each rank, a line each, and what else is known."""
    lines = []
    shown = sorted(found.ranks, key=lambda each: (each.rank not in found.origin, each.rank))
    for each in shown[:_SHOWN]:
        lines += _of_rank(each, found)
    if len(shown) > _SHOWN:
        lines.append(f"{len(shown) - _SHOWN:,} other ranks differ, too")
    others = found.world - len(found.ranks)
    if found.ranks and others:
        lines.append(f"{_ranks(others)} had equal bits each time")
    if found.random:
        ranks = ", ".join(map(str, found.random[:_SHOWN]))
        lines.append(f"rank {ranks}: torch's random generators have other states before that")
    lines += [f"not alike in all runs: {each}" for each in found.facts]
    return lines + _of_checkpoint(found.against, found)


def _of_rank(each: RankDifferences, found: Judgement) -> list[str]:
    first = each.first
    groups = ""
    if found.runs > 2:
        groups = "; equal in runs " + ", and in ".join(" and ".join(map(str, group)) for group in first.alike)
    lines = [f"rank {each.rank} (on {each.host}): first {_what(first)}, {_when(first)}{groups}"]
    counts = ", ".join(f"{wrong:,} of {of:,} {_COUNTED[phase]}" for phase, wrong, of in each.counts)
    lines.append(f"  {'after the load' if first.step == found.step else 'in that step'}: {counts}")
    if len(each.names) > 1:
        lines.append(f"  {_COUNTED[first.phase]}: {', '.join(each.names)}")
    return lines


def _of_checkpoint(against: Against, found: Judgement) -> list[str]:
    if against.reason:
        return [f"the checkpoint of step {found.until} is not compared: {against.reason}"]
    if found.meaning is Meaning.EQUAL or not against.tensors:
        return []
    if found.meaning is not Meaning.ORIGINAL:
        equal = " and ".join(map(str, against.equal))
        same = f"run {equal} ends with the values of" if len(against.equal) == 1 else f"runs {equal} end with the values of"
        return [f"{same if against.equal else 'no run ends with the values of'} the checkpoint of step {found.until}"]
    wrong = sum(count for each in against.ranks for _, count, _ in each.counts)
    lines = [f"{wrong:,} of {against.tensors:,} tensors differ, on {_ranks(len(against.ranks))} of {found.world:,}"]
    for each in against.ranks[:_SHOWN]:
        lines.append(f"  rank {each.rank} (on {each.host}): {', '.join(each.names)}")
    return lines


def next_steps(found: Judgement) -> str:
    """Return what to do."""
    origin = [each for each in found.ranks if each.rank in found.origin]
    hosts = ", ".join(dict.fromkeys(each.host for each in origin))
    if found.meaning is Meaning.EQUAL:
        return _NOTHING if found.against.equal else f"{_NOTHING}. Repeat other steps, or more often (--times 5)"
    if found.meaning is Meaning.ORIGINAL:
        return _ORIGINAL
    if found.meaning is Meaning.INPUT:
        return (
            "let the script give the same data after a resume: pass its loader to the load, and draw no random number that the "
            "resume does not restore"
        )
    if origin[0].first.step == found.step:
        return f"{_LOADED}: read the checkpoint with 'unickpt verify', and test the memory, the disk and the network of {hosts}"
    if found.meaning is Meaning.SDC_COMPUTE:
        return (
            f"test the memory and the GPU of {hosts}, and repeat with --times 5: a fault of one GPU stays on its rank, and an "
            "operator that is not repeatable comes to others as well. Then go back to a checkpoint before the fault"
        )
    if found.meaning is Meaning.NO_MAJORITY:
        return (
            f"start again on another host, and with --times 5. If it differs there, too, an operator is not repeatable. "
            f"Otherwise test the memory and the GPU of {hosts}"
        )
    if not any(each.first.phase.local for each in origin):
        return (
            "a collective, or what follows it, is not repeatable: its algorithm or its order may change from run to run. "
            "Torch's deterministic algorithms, and a fixed algorithm of the collectives, show which"
        )
    return (
        "an operator is not repeatable there, such as an atomic addition, the backward pass of an attention kernel, or noise "
        "without a seed. torch.use_deterministic_algorithms(True) names many of them. Until it is repeatable, no repetition "
        "can show a fault of the hardware"
    )


_NOTHING = "nothing here speaks for a fault of the hardware or an operator that is not repeatable"
_LOADED = "the load of one checkpoint has given several values"
_ORIGINAL = (
    "either the original run has computed something wrong: test its hosts, and go back to the checkpoint from which the step "
    "was repeated. Or the script does not restore something that it had then, such as the position of its data loader or a "
    "setting: if the first steps after a resume have another loss than in the log of the original run, suspect the data first"
)


def _what(place: Place) -> str:
    return _NAMES[place.phase].format(what=place.what)


def _when(place: Place) -> str:
    return f"step {place.step}" + ("" if place.micro_batch < 0 else f", micro-batch {place.micro_batch}")


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count:,} ranks"
