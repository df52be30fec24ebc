"""``unickpt example``: print or write the configurations, launch files and scripts that the guides use."""

from __future__ import annotations

import argparse
import difflib
import os
from pathlib import Path

from unickpt.base.errors import ConfigError
from unickpt.base.installation import shipped_file
from unickpt.cli.exit_codes import SOUND
from unickpt.cli.output import Output

# The last part of a path is the name of the example.
_EXAMPLES = {
    "configs/deepspeed/zero1_bf16.json": "DeepSpeed: ZeRO-1 in bf16, gradients added up in fp32",
    "configs/deepspeed/zero2.json": "DeepSpeed: ZeRO-2 in bf16",
    "configs/deepspeed/zero3.json": "DeepSpeed: ZeRO-3 in bf16",
    "configs/deepspeed/zero3_offload.json": "DeepSpeed: ZeRO-3, parameters and optimizer in host memory",
    "configs/deepspeed/hf_zero2_auto.json": "Hugging Face Trainer: ZeRO-2, with values of Trainer's arguments",
    "configs/deepspeed/hf_zero3_auto.json": "Hugging Face Trainer: ZeRO-3, with values of Trainer's arguments",
    "configs/deepspeed/zero2_cpu.json": "DeepSpeed without a GPU: ZeRO-2 with PyTorch's AdamW, which needs no compiler",
    "configs/deepspeed/hf_zero2_cpu.json": "Hugging Face Trainer without a GPU: the same, with values of Trainer's arguments",
    "configs/megatron/minimal.args": "Megatron: save and load unickpt checkpoints, and nothing else",
    "configs/megatron/pretrain-distributed-optimizer.args": "Megatron: bf16, distributed optimizer, saves in the background",
    "configs/megatron/pretrain-memory.args": "Megatron: checkpoints in the memory of the hosts, and some on disk",
    "configs/launch/slurm.sbatch": "Slurm: a job that goes on when hosts are lost, for torchrun --rdzv-backend unickpt",
    "configs/launch/kubeflow-pytorchjob.yaml": "Kubernetes: the same as a PyTorchJob of the Kubeflow training operator",
    "configs/launch/Containerfile": "container image with unickpt and DeepSpeed, from a wheelhouse without a network",
    "configs/monitoring/grafana-unickpt.json": "Grafana: a dashboard of steps, hosts, verdicts, downtime and memory",
    "configs/monitoring/prometheus-alerts.yaml": "Prometheus: alerts about hangs, slow ranks, parked hosts, restarts",
    "examples/deepspeed_resume.py": "DeepSpeed script that goes on with any number of ranks",
    "examples/python_api.py": "script that saves on two ranks and loads on one, without a framework",
    "examples/megatron-cpu.py": "Megatron without a GPU: pretrain_gpt.py of its tree, on the CPU",
    "examples/demo": "one training under four layouts: run.py for DeepSpeed, megatron_run.py for Megatron",
    "configs/dialects": "the dialects, to copy for a new model family",
    "configs/unickpt.schema.json": "JSON Schema of a DeepSpeed configuration with the key, for editors",
    "configs/dialect.schema.json": "JSON Schema of dialects, for editors",
}


def run(args: argparse.Namespace, out: Output) -> int:
    """List the examples, print one, or write one.

    Raises:
        ConfigError: there is no such example, or a file of it exists in the folder.
        OSError: a file cannot be read or written.
    """
    if args.name is None:
        if args.to is not None:
            raise ConfigError("--to needs the NAME of an example; 'unickpt example' lists them")
        width = max(len(Path(path).name) for path in _EXAMPLES)
        out.text("\n".join(f"{Path(path).name:{width}}  {about}" for path, about in _EXAMPLES.items()))
        return SOUND
    files = _files(args.name)
    if args.to is not None:
        _write(files, args.to, out)
    elif args.name in files:
        out.text(files[args.name].read_text(encoding="utf-8").removesuffix("\n"))
    else:
        out.text("\n".join(files))
    return SOUND


def _files(name: str) -> dict[str, Path]:
    """Return the files of an example by their names. An example with several files is a folder: ``demo/run.py``.

    Raises:
        ConfigError: there is no such example.
    """
    known: dict[str, dict[str, Path]] = {}
    for path in _EXAMPLES:
        source = shipped_file(path)
        if source.is_dir():
            several = {f"{source.name}/{each.name}": each for each in sorted(source.iterdir()) if each.is_file()}
            known |= {source.name: several, **{each: {each: file} for each, file in several.items()}}
        else:
            known[source.name] = {source.name: source}
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else "'unickpt example' lists them"
        raise ConfigError(f"there is no example {name!r}; {hint}")
    return known[name]


def _write(files: dict[str, Path], folder: Path, out: Output) -> None:
    """Write all files, or none if one exists.

    Raises:
        ConfigError: a file exists.
        OSError: a file cannot be written.
    """
    if present := [str(folder / name) for name in files if os.path.lexists(folder / name)]:
        raise ConfigError(f"{', '.join(present)}: exists, and is not replaced; nothing was written")
    for name, source in files.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("xb") as file:
            file.write(source.read_bytes())
        out.line(str(target))
