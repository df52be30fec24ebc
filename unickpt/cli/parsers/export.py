"""Arguments of ``unickpt export``."""

from __future__ import annotations

import argparse
from pathlib import Path

from unickpt.checkpoint.storage.base import is_url
from unickpt.cli.parsers.common import add_json

EXAMPLE = "unickpt export runs/a exported --to vllm --bits 4"
HF, VLLM, PEFT, UNIVERSAL, DCP = "hf", "vllm", "peft", "deepspeed-universal", "dcp"
TORCH_DIST, FSDP = "torch-dist", "fsdp-dtensor"
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "directory",
        metavar="DIR",
        help="a checkpoint, a save directory (follows 'latest'), or checkpoint-500 of a Trainer run; a path or a URL",
    )
    parser.add_argument("output", metavar="FOLDER", type=_folder, help="output directory")
    parser.add_argument(
        "--to",
        choices=(HF, VLLM, PEFT, UNIVERSAL, DCP, TORCH_DIST, FSDP),
        default=HF,
        help="hf (default): weights as safetensors, for from_pretrained of transformers. vllm: the same for vLLM, rounded to "
        "--bits. peft: LoRA adapters alone, for PeftModel.from_pretrained. deepspeed-universal: masters and "
        'optimizer states, for DeepSpeed with "checkpoint": {"load_universal": true}. dcp: weights and optimizer states under '
        "their own names, for torch.distributed.checkpoint. torch-dist: the same for Megatron with --ckpt-format torch_dist, "
        "under any parallel shape. fsdp-dtensor: the same for Megatron with --use-megatron-fsdp",
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FOLDER",
        help="folder of a model of the same kind: gives the configuration; --to hf and vllm copy config.json and the tokenizer "
        "from it (default: what the checkpoint keeps of its model, its folder, or the one above, as in a Trainer run)",
    )
    lora = parser.add_argument_group("options of --to peft")
    lora.add_argument(
        "--lora-config",
        type=Path,
        metavar="PATH",
        help="adapter_config.json, or its folder (default: in the folder of the checkpoint, or the one above)",
    )
    lora.add_argument(
        "--lora-alpha",
        type=float,
        metavar="N",
        help="without the file: make one. Scaling is N / rank; names and shapes say the rest",
    )
    lora.add_argument("--lora-rslora", action="store_true", help="with --lora-alpha: scaling is N / sqrt(rank)")
    lora.add_argument("--lora-base", default="", metavar="MODEL", help="with --lora-alpha: base_model_name_or_path of the file")
    lora.add_argument("--lora-adapter", default="", metavar="NAME", help="name of the adapter, if there are several")
    parser.add_argument("--with-code", action="store_true", help="copy *.py from --config, too (custom code of a model)")
    parser.add_argument(
        "--dialect", default="", metavar="FAMILY", help="family of the model, if nothing else tells it, or file of a dialect"
    )
    parser.add_argument(
        "--bits",
        default="",
        metavar="4|8|16|PLAN.json",
        help="with vllm: bits of the weights of Linear modules, rounded to nearest in groups of 128. 4/32: in groups of 32. "
        "8/channel: one scale for each row. A file: the plan of 'unickpt plan bits' (default: 16)",
    )
    parser.add_argument(
        "--dtype",
        choices=tuple(DTYPES),
        help="dtype of all floating point weights (default: as stored; with vllm: bfloat16 for a model in float32)",
    )
    parser.add_argument(
        "--shard-gigabytes", type=float, default=5.0, metavar="N", help="maximum size of a file, in GB (default: 5)"
    )
    parser.add_argument(
        "--tag", default="", help="with deepspeed-universal: tag to write (default: global_step<step>_universal)"
    )
    parser.add_argument(
        "--expert-parallel",
        choices=("yes", "no"),
        help="with torch-dist, for a model with experts: whether the jobs that load it have --expert-model-parallel-size above "
        "1, where experts have an optimizer of their own (default: as in the job that saved it)",
    )
    parser.add_argument(
        "--no-verify", action="store_true", help="do not check the checkpoint against its checksums before the export"
    )
    add_json(parser)


def _folder(text: str) -> Path:
    if is_url(text):
        raise argparse.ArgumentTypeError(f"{text}: the output must be a local directory; upload it afterwards")
    return Path(text)
