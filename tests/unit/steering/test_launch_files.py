"""Commands and files of "My job on 64 hosts": torchrun's own parser and the options of the backend accept them."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config
from torch.distributed.run import get_args_parser, parse_min_max_nnodes

from tests.support.repository import REPO
from unickpt.base.options.steering import from_rendezvous
from unickpt.steering.rendezvous import limits_of

yaml: Any = pytest.importorskip("yaml")

FILES = REPO / "configs/launch"
PAGE = (REPO / "docs/guides/my-job-on-64-hosts.md").read_text()
VARIABLES = {"$NODES": "60:64", "$PROCESSES": "8", "$SHARED": "/shared", "$ENDPOINT": "h:1", "$JOB": "7"}


def torchruns() -> dict[str, list[str]]:
    """Return the arguments of each torchrun on the page and in the files."""
    found = {}
    for name, text in (("page", PAGE), ("slurm", (FILES / "slurm.sbatch").read_text())):
        for at, command in enumerate(re.findall(r"^[^#\n]*?\btorchrun ((?:.*\\\n)+.*)", text, re.MULTILINE)):
            for variable, value in VARIABLES.items():
                command = command.replace(variable, value)
            found[f"{name} {at}"] = shlex.split(command.replace("\\\n", " ").replace('"$@"', "train.py"))
    pod = next(each for each in manifest() if each["kind"] == "PyTorchJob")["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
    (container,) = pod["spec"]["containers"]
    assert container["command"][0] == "torchrun"
    return {**found, "kubernetes": container["command"][1:]}


def manifest() -> list[Any]:
    return list(yaml.safe_load_all((FILES / "kubeflow-pytorchjob.yaml").read_text()))


def parsed(arguments: list[str]) -> argparse.Namespace:
    found: argparse.Namespace = get_args_parser().parse_args(arguments)
    return found


@pytest.mark.parametrize("name", ["page 0", "slurm 0", "kubernetes"])
def test_torchrun_and_the_backend_accept_the_command(name: str) -> None:
    args = parsed(torchruns()[name])
    assert (args.rdzv_backend, args.nproc_per_node, args.training_script) == ("unickpt", "8", "train.py")
    least, most = parse_min_max_nnodes(args.nnodes)
    options = from_rendezvous(_parse_rendezvous_config(args.rdzv_conf))
    assert (options.secret_file != "", options.history != "", options.metrics_port) == (True, True, 9401)
    limits = limits_of(RendezvousParameters("unickpt", args.rdzv_endpoint, args.rdzv_id, least, most), options)
    assert (limits.min_nodes, limits.max_nodes) == (60, 64)


def test_the_parts_of_the_manifest_fit_together() -> None:
    secret, service, job = manifest()
    args = parsed(torchruns()["kubernetes"])
    worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    least, most = parse_min_max_nnodes(args.nnodes)
    policy = job["spec"]["elasticPolicy"]
    assert (policy["minReplicas"], policy["maxReplicas"], worker["replicas"]) == (least, most, most)
    assert args.rdzv_endpoint == f"{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    assert service["spec"]["selector"]["training.kubeflow.org/job-name"] == job["metadata"]["name"]
    pod = worker["template"]["spec"]
    assert {volume["name"] for volume in pod["volumes"]} == {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert pod["volumes"][0]["secret"]["secretName"] == secret["metadata"]["name"]
    assert list(secret["stringData"]) == ["secret"]


def test_the_slurm_script_is_valid_bash() -> None:
    subprocess.run(["bash", "-n", str(FILES / "slurm.sbatch")], check=True)


def test_the_example_of_allowed_sizes_is_right() -> None:
    """A batch of 1,920 with micro batches of 1 on hosts of 8 GPUs."""
    assert [hosts for hosts in range(48, 65) if 1920 % (8 * hosts) == 0] == [48, 60]
    assert "only 48 and 60 make a batch of 1,920" in PAGE
