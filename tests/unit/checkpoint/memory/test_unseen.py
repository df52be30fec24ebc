"""A job without a memory tier says that there are checkpoints in memory, since it does not look at them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.rank_threads import alone
from unickpt.base.options.job import MemoryOptions
from unickpt.checkpoint.memory.host_folder import HostFolder, make_token
from unickpt.checkpoint.memory.offers import MemoryResume
from unickpt.checkpoint.memory.tier import MemoryTier
from unickpt.checkpoint.save.requests import SaveOptions


def test_a_load_without_a_tier_warns_of_checkpoints_in_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shared, run = tmp_path / "shm", tmp_path / "run"
    beside = run / "non_persistent"
    for folder in (shared, beside):
        folder.mkdir(parents=True)
    tier = MemoryTier(MemoryOptions(folder=str(shared)), SaveOptions())
    assert not tier.enabled
    host = HostFolder(shared, make_token(str(beside)))
    host.make()
    MemoryResume(tier, str(run), alone(), beside=(str(beside),))
    assert not caplog.messages
    host.generation(7).mkdir()
    (host.generation(7) / "manifest.json").write_text("{}")
    assert host.inventory().files.keys() == {7}
    MemoryResume(tier, str(run), alone(), beside=(str(beside),))
    assert [text for text in caplog.messages if f"checkpoints of {beside} in the memory of this host" in text]
