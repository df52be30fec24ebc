"""The folders in shared memory by which the ranks of a host read together."""

from __future__ import annotations

import os
import shutil
import time
import uuid

import pytest

from unickpt.base.private_files import SHARED_MEMORY, make_folder
from unickpt.checkpoint.coordination import host_peers


def test_only_folders_that_are_old_by_the_clock_of_the_files_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of a process may be wrong, and another rank has just made its folder."""
    own, fresh, old = (SHARED_MEMORY / f"unickpt-load-{uuid.uuid4().hex}" for _ in range(3))
    try:
        for folder in (fresh, old):
            make_folder(folder)
        os.utime(old, (time.time() - 7200,) * 2)
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() + 7200)
        assert host_peers._prepare(own, 1, None, 1) is None
        assert [folder.exists() for folder in (own, fresh, old)] == [True, True, False]
    finally:
        for folder in (own, fresh, old):
            shutil.rmtree(folder, ignore_errors=True)
