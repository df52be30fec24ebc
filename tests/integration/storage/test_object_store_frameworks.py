"""DeepSpeed and Megatron jobs that save to an object store and resume from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.forked_jobs import fork_ranks
from tests.support.s3 import CREDENTIALS, Bucket
from tests.support.stored_steps import needs_store

pytestmark = needs_store


def test_deepspeed_saves_to_a_url_and_resumes_from_it(tmp_path: Path, bucket: Bucket) -> None:
    pytest.importorskip("deepspeed")
    env = {**CREDENTIALS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{bucket.port}", "UNICKPT_TEST_URL": bucket.url}
    fork_ranks(
        2,
        "tests.jobs.deepspeed.scenario_worker",
        "object_store",
        str(tmp_path),
        timeout_s=600,
        env=env,
    )
    failures = json.loads((tmp_path / "w2.json").read_text())
    assert failures
    assert not any(failures.values()), failures


def test_megatron_saves_to_a_url_uploads_and_resumes(tmp_path: Path, bucket: Bucket) -> None:
    pytest.importorskip("megatron.core")
    env = {**CREDENTIALS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{bucket.port}", "UNICKPT_TEST_URL": bucket.url}
    name = "the_library_accepts_urls_and_the_scripts_refuse_them"
    fork_ranks(2, "tests.jobs.megatron.scenario_worker", str(tmp_path), name, timeout_s=300, env=env)
    assert json.loads((tmp_path / "w2.json").read_text()) == {name: {}}
    assert bucket.get("megatron/library/metadata.json")


def test_torch_saves_to_a_url_and_resumes_from_it(tmp_path: Path, bucket: Bucket) -> None:
    env = {**CREDENTIALS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{bucket.port}", "UNICKPT_TEST_URL": bucket.url}
    name = "urls_of_an_object_store_are_folders"
    fork_ranks(2, "tests.jobs.torch.scenario_worker", str(tmp_path), name, timeout_s=300, env=env)
    assert json.loads((tmp_path / "w2.json").read_text()) == {name: {}}
