"""The JSONs in ``configs/deepspeed`` enable unickpt, and each resumes from the checkpoint of any other.

Megatron's parser takes the argument files in ``configs/megatron``, where ``MEGATRON_LM=/path/to/Megatron-LM`` names a tree.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.forked_jobs import fork_ranks
from tests.support.repository import REPO
from unickpt.testing.launch import environment

CONFIGS = sorted((REPO / "configs" / "deepspeed").glob("*.json"))
ARGUMENTS = sorted((REPO / "configs" / "megatron").glob("*.args"))
MEGATRON = os.environ.get("MEGATRON_LM", "")
PARSE = """
import os, sys
from megatron_unickpt.testing import cpu
sys.path.insert(0, os.environ["MEGATRON_LM"])
from megatron.training.arguments import parse_args
for path in sys.argv[1:]:
    sys.argv = [path, *(word for line in open(path) if not line.startswith("#") for word in line.split())]
    print(path, parse_args().unickpt)
"""


SAMPLES = [
    {"enabled": True}, {"enabled": 1}, {"enabled": "yes"}, {}, {"timing": {"enabled": True}}, {"timing": {"enable": True}},
    {"timing": True}, {"verify": "always"}, {"verify": "never"}, {"keep_last": 3}, {"keep_last": 2.5}, {"keep_last": "3"},
    {"staging_gigabytes": 2}, {"staging_gigabytes": 0.5}, {"staging_gigabytes": None}, {"on_buzy": "wait"},
    {"timing": {"records": 1000, "folder": "/x"}}, {"timing": {"records": "many"}},
    {"timing": {"records": 0}}, {"timing": {"metrics_port": 65536}}, {"keep_last": -1}, {"grace_seconds": 0},
    {"sync_save": True},
]  # fmt: skip


@pytest.mark.parametrize("value", SAMPLES, ids=json.dumps)
def test_the_schema_accepts_what_the_options_accept(value: dict[str, object]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    from ds_unickpt.batch.config import read_options
    from unickpt.base.errors import ConfigError

    schema = json.loads((REPO / "configs" / "unickpt.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    try:
        read_options({"unickpt": value})
    except ConfigError:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({"unickpt": value}, schema)
    else:
        jsonschema.validate({"unickpt": value}, schema)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_json_has_a_valid_key(path: Path) -> None:
    from ds_unickpt.batch.config import read_options

    options = read_options(json.loads(path.read_text()))
    assert options is not None
    assert options.enabled


def test_every_json_but_those_for_hugging_face_is_tried() -> None:
    from tests.jobs.deepspeed.config_worker import NAMES

    assert {path.stem for path in CONFIGS if not path.stem.startswith("hf_")} == set(NAMES)


def test_the_json_of_trainer_without_a_gpu_is_the_one_that_tests_of_trainer_run() -> None:
    from tests.jobs.hf.jobs import shipped

    assert json.loads((REPO / "configs/deepspeed/hf_zero2_cpu.json").read_text()) == shipped("hf_zero2_auto")


@pytest.mark.timeout(600)
def test_every_json_resumes_from_every_other_one(tmp_path: Path) -> None:
    from tests.jobs.deepspeed.config_worker import NAMES

    fork_ranks(2, "tests.jobs.deepspeed.config_worker", str(tmp_path))
    results = json.loads((tmp_path / "results.json").read_text())
    assert len(results) == len(NAMES) ** 2
    assert {pair: problems for pair, problems in results.items() if problems} == {}


@pytest.mark.parametrize("path", ARGUMENTS, ids=lambda path: path.stem)
def test_an_argument_file_is_one_option_a_line_below_its_comment(path: Path) -> None:
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    assert all(line.startswith("--") and len(line.split()) <= 2 for line in lines), lines
    assert "--ckpt-format unickpt" in lines
    assert f"$(unickpt example {path.name} | grep -v '^#')" in path.read_text()


@pytest.mark.skipif(not MEGATRON, reason="MEGATRON_LM names no Megatron-LM tree")
def test_megatron_knows_every_option_of_the_argument_files() -> None:
    files = [str(path) for path in ARGUMENTS]
    done = subprocess.run(
        [sys.executable, "-c", PARSE, *files], env=environment(), cwd=REPO, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert all(f"{path} True" in done.stdout.splitlines() for path in files), done.stdout[-3000:]
