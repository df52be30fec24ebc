"""Some of the mutations of ``evidence/fuzz.py``. See attacks.py."""

from __future__ import annotations

import contextlib
import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.hostile.attacks import refused
from tests.hostile.mutation import Attacker, limited_memory, text_of
from tests.hostile.pickle_grammar import PickleAttacker, Watch
from tests.support import handmade
from tests.support.handmade import IndexParts
from unickpt.base.errors import UnickptError
from unickpt.checkpoint.format import manifest

INPUTS = {"a checkpoint's directory": 60}  # it is slower


@pytest.fixture(scope="module")
def attacker(sound: Path, tmp_path_factory: pytest.TempPathFactory) -> Attacker:
    return Attacker(sound, tmp_path_factory.mktemp("attacked") / "global_step3")


@pytest.mark.parametrize("name", Attacker.NAMES)
def test_mutations(attacker: Attacker, name: str) -> None:
    target = attacker.targets[name]
    for number in range(INPUTS.get(name, 300)):
        made = target.make(random.Random(f"tests/{number}"))
        with limited_memory(), contextlib.suppress(UnickptError):
            target.use(made)


@pytest.fixture(scope="module")
def pickles(tmp_path_factory: pytest.TempPathFactory) -> tuple[PickleAttacker, Watch]:
    attacker = PickleAttacker(tmp_path_factory.mktemp("pickles") / "work")
    for target in attacker.targets.values():  # imports do not count
        with contextlib.suppress(UnickptError):
            target.use(target.make(random.Random(0)))
    return attacker, Watch()


@pytest.mark.parametrize("name", PickleAttacker.NAMES)
def test_pickles_by_grammar(pickles: tuple[PickleAttacker, Watch], name: str) -> None:
    attacker, watch = pickles
    target = attacker.targets[name]
    for number in range(400):
        made = target.make(random.Random(f"tests/{number}"))
        with limited_memory(), watch.below(attacker.work), contextlib.suppress(UnickptError):
            target.use(made)


def test_the_watch_sees_files_opened_elsewhere(pickles: tuple[PickleAttacker, Watch], tmp_path: Path) -> None:
    attacker, watch = pickles
    with watch.below(attacker.work):
        (attacker.work / "inside").write_bytes(b"")
    with pytest.raises(AssertionError, match=r"opened .*secret"), watch.below(attacker.work):
        (tmp_path / "secret").write_bytes(b"")


def test_random_cells_of_the_index(sound: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    for number in range(60):
        chance = random.Random(f"cells/2/{number}")
        shutil.rmtree(victim, ignore_errors=True)
        shutil.copytree(sound, victim)
        parts = IndexParts(victim)
        column = chance.choice(sorted(parts.columns))
        if chance.random() < 0.5:
            parts.columns[column] = parts.columns[column].astype(np.uint64)
        values = parts.columns[column].reshape(-1)
        limits = np.iinfo(values.dtype)
        for _ in range(chance.randint(1, 4)):
            small = chance.randint(max(-3, int(limits.min)), 30)
            values[chance.randrange(len(values))] = chance.choice([small, chance.randint(int(limits.min), int(limits.max))])
        parts.write()
        refused(victim)


def test_nesting_at_the_limit_of_the_reader_is_refused(attacker: Attacker) -> None:
    """One depth, which depends on the caller's, can be read but not written for the checksum."""
    rest = {key: value for key, value in attacker.body.items() if key != "checksum"}
    for depth in range(800, 1001):
        text = text_of({**rest, "objects": {"deep": f"NEST:{depth}:0"}})
        signed = text[:-1] + f',"checksum":"{handmade.digest(text)}"'.encode() + b"}"
        with contextlib.suppress(UnickptError):
            manifest.from_bytes(signed, where="deep")
