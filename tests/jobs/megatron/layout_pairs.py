"""Layouts of the matrix, and the pairs to test. Imports nothing of megatron."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

from megatron_unickpt.testing.layouts import Layout

SHAPES = (
    "one", "dp2", "dp4", "tp2", "tp4", "pp2", "pp4", "cp2", "tp2pp2", "tp2dp2", "pp2dp2", "cp2dp2", "tp2cp2", "pp2cp2",
    "pp2vpp2", "pp2vpp2dp2", "tp2pp2vpp2",
)  # fmt: skip
MOE_SHAPES = ("one", "dp2", "dp4", "tp2", "pp2", "pp4", "ep2dp2", "ep2dp4", "tp2ep2dp2", "pp2ep2dp2", "cp2ep2dp2", "pp2dp2")
OPTIMIZERS = ("dist", "plain", "fp32")
# Pairs that Megatron's own formats refuse.
HARD = (
    ("gpt-tp2dp2-dist", "gpt-tp2dp2-plain"),  # KeyError 'optimizer.state.fp32_param...'
    ("gpt-tp2dp2-plain", "gpt-tp2dp2-dist"),  # KeyError 'distrib_optim_sharding_type'
    ("gpt-tp2pp2-dist", "gpt-pp4-dist"),  # dp_reshardable: RuntimeError
    ("gpt-tp2pp2-dist", "gpt-dp4-dist"),
    ("gpt-tp4-dist", "gpt-one-fp32"),
    ("gpt-one-fp32", "gpt-tp2pp2-dist"),
    ("gpt-pp2vpp2dp2-dist", "gpt-tp2pp2vpp2-plain"),
    ("moe-ep2dp2-dist", "moe-dp2-dist"),  # EP2 -> EP1: KeyError 'optimizer' or 'pre_wd_mult'
    ("moe-dp2-dist", "moe-ep2dp2-dist"),  # EP1 -> EP2: a missing rng_state, then a wrong number of optimizers
    ("moe-ep2dp4-dist", "moe-tp2-plain"),
    ("moe-tp2ep2dp2-plain", "moe-one-fp32"),
    ("moe-one-fp32", "moe-ep2dp4-dist"),
)
SAME = (("gpt-pp2vpp2dp2-dist", "gpt-pp2vpp2dp2-dist"), ("moe-ep2dp4-dist", "moe-ep2dp4-dist"))


def layouts() -> list[Layout]:
    """Return every shape with one optimizer, those of ``HARD``, and some shapes with all three."""
    names = []
    for kind, shapes in (("gpt", SHAPES), ("moe", MOE_SHAPES)):
        for at, shape in enumerate(shapes):
            wrappers = OPTIMIZERS if shape in ("one", "dp2", "tp2dp2", "tp2pp2", "ep2dp2") else (OPTIMIZERS[at % 3],)
            names += [f"{kind}-{shape}-{wrapper}" for wrapper in dict.fromkeys(wrappers)]
    names += [name for pair in HARD for name in pair]
    return [Layout.parse(name) for name in dict.fromkeys(names)]


def _covered(source: Layout, target: Layout) -> set[tuple[object, ...]]:
    """Of every field, its two values."""
    return {(field.name, getattr(source, field.name), getattr(target, field.name)) for field in fields(source)}


def pairs(*, full: bool = False) -> list[tuple[Layout, Layout]]:
    """Pairs of layouts of one model: the hard ones, some layouts into themselves, and then greedily until every value
    of a field meets every value of that field on the other side; with ``full`` all of them."""
    known = layouts()
    every = [(a, b) for a in known for b in known if a.moe == b.moe]
    if full:
        return every
    chosen = [(Layout.parse(a), Layout.parse(b)) for a, b in (*HARD, *SAME)]
    covers = [(pair, _covered(*pair)) for pair in every]
    left = set().union(*(covered for _, covered in covers)) - set().union(*(_covered(*pair) for pair in chosen))
    while left:
        saved = {source for source, _ in chosen}  # another load of a saved layout costs less than another save
        best, covered = max(covers, key=lambda each: (len(each[1] & left), each[0][0] in saved))
        chosen.append(best)
        left -= covered
    return list(dict.fromkeys(chosen))


def worlds(chosen: Iterable[Layout]) -> list[int]:
    """Return the world sizes of the layouts, in order."""
    return sorted({layout.world for layout in chosen})
