"""A model folder for vLLM: the weights of transformers, rounded to few bits in the compressed-tensors format."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unickpt.base.errors import FormatError, MismatchError
from unickpt.base.listing import some
from unickpt.checkpoint.format.dtypes import torch_dtype
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.transform.convert.huggingface.writer import ExportedModel, export, weights
from unickpt.transform.convert.pickles.regular_files import read_json
from unickpt.transform.dialects.hf_layouts import in_files
from unickpt.transform.quantise.encoding import CastEncoding, Encoding, Packed
from unickpt.transform.quantise.modules import layer_of, units_of
from unickpt.transform.quantise.recipe import Recipe, planned, uniform
from unickpt.transform.quantise.scheme import Scheme


@dataclass(frozen=True, slots=True)
class ForVllm:
    """How a checkpoint is written for vLLM.

    Attributes:
        encoding: how its tensors are written.
        settings: additions to ``config.json``.
        notes: what differs from the request, one sentence each.
    """

    encoding: Encoding
    settings: Mapping[str, Any]
    notes: tuple[str, ...]


def for_vllm(checkpoint: Checkpoint, bits: str | os.PathLike[str] = "16", dtype: torch.dtype | None = None) -> ForVllm:
    """Decide how a checkpoint is written.

    Args:
        checkpoint: checkpoint under the names of transformers (``as_huggingface``).
        bits: scheme of all Linear modules (``Scheme.parse``), or file with the plan of ``unickpt plan bits``.
        dtype: dtype of scales and of all weights that are not rounded. None: as stored; bfloat16 for a model in float32.

    Raises:
        ConfigError: ``bits`` is neither a scheme nor a file.
        FormatError: the file is not a plan.
        MismatchError: the plan is that of another model, or no weight can be rounded.
    """
    infos = weights(in_files(checkpoint))
    recipe = recipe_of(infos, str(bits), plan_in(bits), str(Path(bits)))
    cast = CastEncoding(compute_dtype(infos) if dtype is None else dtype)
    matrices = [info for info in infos if info.name.endswith(".weight") and len(info.shape) == 2]
    dtypes = {str(torch_dtype(cast.dtype(info))).removeprefix("torch.") for info in matrices}
    settings: dict[str, Any] = {"dtype": dtypes.pop()} if len(dtypes) == 1 else {}
    if not recipe.rounds:
        return ForVllm(cast, settings, recipe.notes)
    stacked = [info.name for info in infos if layer_of(info.name) is not None and len(info.shape) > 2]
    notes = (*recipe.notes, *([f"not rounded, because they are not matrices: {some(stacked)}"] if stacked else ()))
    names = [info.name.removesuffix(".weight") for info in matrices]
    settings["quantization_config"] = recipe.quantization_config(
        [module for module in names if module not in recipe.schemes and "embed" not in module]
    )
    return ForVllm(Packed(recipe.schemes, cast), settings, notes)


def export_vllm(
    checkpoint: Checkpoint, folder: Path, *, bits: str | os.PathLike[str] = "16", dtype: torch.dtype | None = None,
    config_from: Path | None = None, with_code: bool = False, shard_bytes: int = 5 << 30,
    progress: Callable[[int], None] = lambda _: None,
) -> ExportedModel:  # fmt: skip
    """Write a folder that vLLM, and transformers with compressed-tensors, load.

    Args:
        checkpoint, bits, dtype: as for ``for_vllm``.
        folder, config_from, with_code, shard_bytes, progress: as for ``export`` of ``writer.py``.

    Raises:
        MismatchError: weights are rounded, and no folder has the ``config.json`` that says so. Others as for ``for_vllm``.
        All others as for ``export``.
    """
    way = for_vllm(checkpoint, bits, dtype)
    if "quantization_config" in way.settings and (config_from is None or not (config_from / "config.json").is_file()):
        raise MismatchError(
            f"{checkpoint.storage}: there is no config.json, which states the rounding: --config FOLDER copies that of a model "
            "of the same kind"
        )
    made = export(
        checkpoint, folder, config_from=config_from, with_code=with_code, encoding=way.encoding, settings=way.settings,
        shard_bytes=shard_bytes, progress=progress,
    )  # fmt: skip
    return dataclasses.replace(made, notes=way.notes)


def compute_dtype(infos: Sequence[TensorInfo]) -> torch.dtype | None:
    """Return the dtype in which a model is served: None (as stored), or bfloat16 for a model in float32."""
    return torch.bfloat16 if any(info.dtype == "F32" and len(info.shape) == 2 for info in infos) else None


def plan_in(bits: str | os.PathLike[str]) -> Mapping[str, Any] | None:
    """Return the plan in a file of ``unickpt plan bits``; None for a scheme.

    Raises:
        ConfigError: it is neither.
        FormatError: the file is not a JSON object.
    """
    path = Path(bits)
    if not path.is_file():
        Scheme.parse(str(bits))
        return None
    try:
        return read_json(path)
    except OSError as err:
        raise FormatError(f"{path}: cannot be read ({err})") from err


def recipe_of(infos: Iterable[TensorInfo], bits: str, plan: Mapping[str, Any] | None, where: str) -> Recipe:
    """Return how the weights of a model are rounded: by a plan from ``where``, or without one by the scheme ``bits``."""
    units = units_of((info.name, info.shape) for info in infos)
    return uniform(Scheme.parse(bits), units) if plan is None else planned(plan, units, where)
