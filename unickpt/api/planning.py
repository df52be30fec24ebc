"""Plan the bits of each weight of a checkpoint, for a limit of memory or for devices of unlike memory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from unickpt.base.errors import ConfigError, MismatchError
from unickpt.checkpoint.format.dtypes import torch_dtype
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.planning.plan.bits import BitPlan, LayerBits, UnitChoices, UnitOption
from unickpt.planning.plan.bits import plan_bits as best_bits
from unickpt.planning.plan.partition import Device, Unmet
from unickpt.transform.convert.huggingface.files import configuration
from unickpt.transform.convert.huggingface.vllm import compute_dtype
from unickpt.transform.convert.huggingface.writer import as_huggingface, weights
from unickpt.transform.convert.pickles.regular_files import read_json
from unickpt.transform.dialects.hf_layouts import in_files
from unickpt.transform.dialects.model_facts import Model
from unickpt.transform.quantise.divergence import DIVERGENCE, errors_of
from unickpt.transform.quantise.encoding import CastEncoding
from unickpt.transform.quantise.inputs import read_inputs
from unickpt.transform.quantise.measure import (
    Measurement,
    UnitErrors,
    has_moments,
    measure,
)
from unickpt.transform.quantise.modules import layer_of, units_of
from unickpt.transform.quantise.recipe import PLAN_SCHEMA
from unickpt.transform.quantise.scheme import CHOICES, INDICATORS, SECOND_MOMENT, WEIGHT_ERROR, Scheme


@dataclass(frozen=True, slots=True)
class BitsRequest:
    """What a plan of bits is for.

    Attributes:
        devices: memory for weights and cache of each stage of the pipeline; one for a single device.
        reorder: whether unlike devices may stand in another order.
        schemes: schemes to choose from.
        indicator: one of ``INDICATORS``, or ``auto``: second moments if the checkpoint has them, otherwise the weight error.
        inputs: file of ``InputStatistics``, or None.
        tokens: tokens whose keys and values are in memory at once.
        dtype: dtype of scales, of 16 bits and of the cache; None: as stored, bfloat16 for a model in float32.
        errors: file of ``measure_rounding``, instead of an indicator; or None.
    """

    devices: Sequence[Device]
    reorder: bool = False
    schemes: Sequence[Scheme] = tuple(map(Scheme.parse, CHOICES))
    indicator: str = "auto"
    inputs: Path | None = None
    tokens: int = 0
    dtype: torch.dtype | None = None
    errors: Path | None = None


def plan_bits(
    directory: str | os.PathLike[str],
    memory_bytes: int | Sequence[int],
    *,
    output: str | os.PathLike[str] | None = None,
    schemes: Sequence[str] = CHOICES,
    indicator: str = "auto",
    inputs: str | os.PathLike[str] | None = None,
    errors: str | os.PathLike[str] | None = None,
    tokens: int = 0,
    reorder: bool = False,
    config: str | os.PathLike[str] | None = None,
    dialect: str = "",
    dtype: torch.dtype | None = None,
) -> dict[str, Any]:
    """Choose the bits of each weight with the least predicted error that fits into memory.

    Example:
        Half of the memory of a model of 7 billion parameters in 16 bits::

            unickpt.plan_bits("out/step100", 7_000_000_000, output="plan.json", config="Llama-2-7b-hf")
            unickpt.export_checkpoint("out/step100", "model", to="vllm", bits="plan.json", config="Llama-2-7b-hf")

    Args:
        directory: checkpoint directory. A path or a URL.
        memory_bytes: memory for weights and cache; several numbers are devices of a pipeline, in order.
        output: file that gets the plan, as JSON.
        schemes: schemes to choose from, as in ``export_checkpoint``.
        indicator: ``second-moment``, ``weight-error``, ``variance``, or ``auto``: the first if the checkpoint has the second
            moments of an optimizer, otherwise the second.
        inputs: file of ``InputStatistics``, for the last two indicators.
        errors: file of ``measure_rounding``, instead of an indicator.
        tokens: tokens whose keys and values are in memory at once.
        reorder: whether devices may stand in another order.
        config: folder with the ``config.json`` of a model of the same kind. ``tokens`` needs one.
        dialect: model family, or file of a dialect, if neither checkpoint nor configuration names it.
        dtype: dtype of what is not rounded. None: as stored; bfloat16 for a model in float32.

    Returns:
        The plan, as ``unickpt plan bits --json`` prints it.

    Raises:
        ConfigError: an option is not possible.
        MismatchError: no plan fits into memory, or the checkpoint lacks what the indicator needs.
        FormatError: ``inputs`` is not a file of statistics, or ``errors`` not one of errors.
        LanguageError: no dialect is known for the model, or the dialect does not fit.
        CorruptCheckpointError, StorageError: the checkpoint is damaged or unreadable.
        OSError: ``output`` cannot be written.
    """
    memories = [memory_bytes] if isinstance(memory_bytes, int) else list(memory_bytes)
    devices = [Device(f"device{at}", memory_bytes=memory) for at, memory in enumerate(memories)]
    statistics, choices = None if inputs is None else Path(inputs), [Scheme.parse(text) for text in schemes]
    known = None if errors is None else Path(errors)
    request = BitsRequest(devices, reorder, choices, indicator, statistics, tokens, dtype, known)
    settings = None if config is None else configuration(Path(config))
    found = planned_bits(as_huggingface(Checkpoint.open(directory), chosen=dialect, config=settings), request, settings)
    if isinstance(found, Unmet):
        raise MismatchError(f"{directory}: no plan: {found}")
    if output is not None:
        Path(output).write_text(json.dumps(found, indent=1) + "\n")
    return found


def planned_bits(
    checkpoint: Checkpoint,
    request: BitsRequest,
    config: Mapping[str, Any] | None,
    progress: Callable[[int], None] = lambda _: None,
) -> dict[str, Any] | Unmet:
    """Return the document of a plan, or the limit that binds. Raises as ``plan_bits``.

    Args:
        checkpoint: checkpoint under the names of transformers.
        config: configuration of the model, or None.
        progress: called with the number of bytes of weights that were read.
    """
    if request.indicator not in ("auto", *INDICATORS):
        raise ConfigError(f"indicator {request.indicator!r}: expected one of auto, {', '.join(INDICATORS)}")
    if request.errors is not None and (request.indicator != "auto" or request.inputs is not None):
        raise ConfigError("measured errors replace the indicator and its inputs: name only one of them")
    known = None if request.errors is None else errors_of(read_json(request.errors), str(request.errors))
    checkpoint = in_files(checkpoint)
    infos = {info.name: info for info in weights(checkpoint)}
    units = units_of((name, info.shape) for name, info in infos.items())
    if not units:
        raise MismatchError(f"{checkpoint.storage}: has no matrices under 'layers.N', as Linear modules have them")
    dtype = compute_dtype(list(infos.values())) if request.dtype is None else request.dtype
    indicator = request.indicator
    if known is not None:
        indicator = WEIGHT_ERROR
    elif indicator == "auto":
        indicator = SECOND_MOMENT if request.inputs is None and has_moments(checkpoint, units) else WEIGHT_ERROR
    inputs = {} if request.inputs is None else read_inputs(request.inputs)
    measured = measure(checkpoint, infos, units, Measurement(indicator, request.schemes, dtype, inputs), progress)
    if known is not None:
        indicator, measured = DIVERGENCE, [_known(each, known, request) for each in measured]
    sizes = {
        name: info.numel * torch.empty(0, dtype=_used(info, dtype), device="cpu").element_size() for name, info in infos.items()
    }
    layers = _layers(measured, infos, sizes, _cache_bytes(request, config, infos, dtype), _tied(checkpoint, sizes, request))
    found = best_bits([layer for _, layer in layers], request.devices, reorder=request.reorder)
    if isinstance(found, Unmet):
        return found
    return _document(found, [number for number, _ in layers], [layer for _, layer in layers], measured, request, indicator)


def _known(measured: UnitErrors, errors: Mapping[str, Mapping[str, float]], request: BitsRequest) -> UnitErrors:
    """Return the unit with the errors of a file. Raises MismatchError if the file has none."""
    unit = measured.unit.name
    own = {scheme: errors.get(unit, {}).get(str(scheme)) if scheme.rounds else 0.0 for scheme in measured.errors}
    lacking = [str(scheme) for scheme, error in own.items() if error is None]
    if lacking:
        raise MismatchError(f"{request.errors}: has no error of {unit} with {', '.join(lacking)}")
    return replace(measured, errors={scheme: error for scheme, error in own.items() if error is not None})


def _used(info: TensorInfo, dtype: torch.dtype | None) -> torch.dtype:
    return torch_dtype(CastEncoding(dtype).dtype(info))


def _tied(checkpoint: Checkpoint, sizes: Mapping[str, int], request: BitsRequest) -> int:
    """Return the bytes of the second copy of a tied embedding, which the last of several devices holds."""
    if len(request.devices) == 1:
        return 0
    return sum(sizes.get(name, 0) for alias, name in checkpoint.manifest.aliases.items() if "head" in alias)


def _cache_bytes(
    request: BitsRequest, config: Mapping[str, Any] | None, infos: Mapping[str, TensorInfo], dtype: torch.dtype | None
) -> int:
    """Return the bytes of keys and values of one layer.

    Raises:
        ConfigError: the configuration does not say how many values a token has.
    """
    if not request.tokens:
        return 0
    facts = Model.of_config(config or {}).facts
    values = 2 * facts.get("groups", 0) * facts.get("head_dim", 0)
    if "latent_rank" in facts:  # multi-latent attention
        values = facts["latent_rank"] + facts.get("rotary_dim", 0)
    if not values:
        raise ConfigError("tokens need the config.json of the model, with its heads and their size")
    itemsize = max(
        torch.empty(0, dtype=_used(info, dtype), device="cpu").element_size() for info in infos.values() if len(info.shape) == 2
    )
    return request.tokens * values * itemsize


def _layers(
    measured: Sequence[UnitErrors], infos: Mapping[str, TensorInfo], sizes: Mapping[str, int], cache_bytes: int, tied_bytes: int
) -> list[tuple[int, LayerBits]]:
    """Return the number and the choices of each layer. The first also has the embedding, the last norm and head."""
    rounded = {f"{module}.weight" for each in measured for module in each.unit.modules}
    numbers = sorted({layer for name in infos if (layer := layer_of(name)) is not None})
    fixed = dict.fromkeys(numbers, cache_bytes)
    fixed[numbers[-1]] += tied_bytes
    for name in infos.keys() - rounded:
        layer = layer_of(name)
        fixed[layer if layer is not None else numbers[0 if "embed" in name else -1]] += sizes[name]
    choices: dict[int, list[UnitChoices]] = {number: [] for number in numbers}
    for each in measured:
        unit, first = each.unit, f"{each.unit.modules[0]}.weight"
        itemsize = sizes[first] // infos[first].numel
        options = tuple(
            UnitOption(str(scheme), sum(scheme.size_bytes(shape, itemsize) for shape in unit.shapes), error)
            for scheme, error in each.errors.items()
        )
        choices[unit.layer].append(UnitChoices(unit.name, options))
    return [(number, LayerBits(fixed[number], tuple(choices[number]))) for number in numbers]


def _document(
    plan: BitPlan,
    numbers: Sequence[int],
    layers: Sequence[LayerBits],
    measured: Sequence[UnitErrors],
    request: BitsRequest,
    indicator: str,
) -> dict[str, Any]:
    by_name = {each.unit.name: each for each in measured}
    units: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    for number, layer, chosen in zip(numbers, layers, plan.chosen, strict=True):
        for unit, option in zip(layer.units, chosen, strict=True):
            scheme, values = Scheme.parse(option.scheme), sum(out * width for out, width in by_name[unit.unit].unit.shapes)
            units.append({
                "unit": unit.unit, "layer": number, "bits": scheme.bits, "group": scheme.group or None, "bytes": option.bytes,
                "values": values, "error": option.error, "relative_error": by_name[unit.unit].relative[scheme],
            })  # fmt: skip
        own = [each for each in units if each["layer"] == number]
        rows.append({
            "layer": number, "bytes": layer.fixed_bytes + sum(each["bytes"] for each in own),
            "mean_bits": sum(each["bits"] * each["values"] for each in own) / max(sum(each["values"] for each in own), 1),
            "error": sum(each["error"] for each in own),
        })  # fmt: skip
    devices = [
        {
            "device": request.devices[at].name, "memory_bytes": request.devices[at].memory_bytes, "first_layer": numbers[begin],
            "last_layer": numbers[end - 1], "bytes": sum(row["bytes"] for row in rows[begin:end]),
            "error": sum(row["error"] for row in rows[begin:end]),
        }
        for at, begin, end in zip(plan.devices, plan.bounds, plan.bounds[1:], strict=False)
    ]  # fmt: skip
    counts = ",".join(str(end - begin) for begin, end in zip(plan.bounds, plan.bounds[1:], strict=False))
    return {
        "schema": PLAN_SCHEMA, "indicator": indicator, "inputs": request.inputs is not None, "exact": plan.exact,
        "error": plan.error, "total_bytes": sum(row["bytes"] for row in rows),
        "devices": devices, "layers": rows, "units": units,
        "vllm_environment": {"VLLM_PP_LAYER_PARTITION": counts} if len(devices) > 1 else {},
    }  # fmt: skip
