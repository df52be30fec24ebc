"""What a model folder in the compressed-tensors format holds. Reads its configuration and the headers of its files."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from unickpt.base.errors import FormatError
from unickpt.checkpoint.format.safetensors_header import TensorSlot
from unickpt.transform.convert.huggingface.files import configuration, header_of
from unickpt.transform.convert.pickles.regular_files import open_regular
from unickpt.transform.quantise.recipe import METHOD
from unickpt.transform.quantise.scheme import WORD_BITS, Scheme

_PACKED, _SCALE, _SHAPE = ".weight_packed", ".weight_scale", ".weight_shape"


@dataclass(frozen=True, slots=True)
class RoundedModule:
    """A module with a rounded weight.

    Attributes:
        name: name of the module.
        scheme: bits and group, from the shapes in the files.
        shape: ``[out, in]`` of the weight.
        size_bytes: packed values and scales.
    """

    name: str
    scheme: Scheme
    shape: tuple[int, int]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class RoundedModel:
    """A model in the compressed-tensors format.

    Attributes:
        format: form of the weights, such as ``pack-quantized``.
        modules: modules with packed weights, by name.
        others: bytes of all other tensors, by dtype.
    """

    format: str
    modules: tuple[RoundedModule, ...]
    others: Mapping[str, int]

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(each.size_bytes for each in self.modules) + sum(self.others.values())


def rounded_model(folder: Path) -> RoundedModel | None:
    """Describe a folder; None if its configuration does not name compressed-tensors.

    Raises:
        FormatError: a file is not a safetensors file, or shapes contradict each other.
        OSError: a file cannot be read.
    """
    settings = configuration(folder).get("quantization_config")
    if not isinstance(settings, dict) or settings.get("quant_method") != METHOD:
        return None
    slots: dict[str, tuple[Path, int, TensorSlot]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        header = header_of(path)
        slots |= {slot.name: (path, header.header_bytes + slot.begin_byte, slot) for slot in header.slots}
    modules = tuple(_module(name.removesuffix(_PACKED), slots, str(folder)) for name in sorted(slots) if name.endswith(_PACKED))
    counted = {f"{each.name}{end}" for each in modules for end in (_PACKED, _SCALE, _SHAPE)}
    others: dict[str, int] = {}
    for name, (_, _, slot) in slots.items():
        if name not in counted:
            others[slot.dtype] = others.get(slot.dtype, 0) + slot.end_byte - slot.begin_byte
    return RoundedModel(str(settings.get("format", "")), modules, others)


def _module(name: str, slots: Mapping[str, tuple[Path, int, TensorSlot]], where: str) -> RoundedModule:
    try:
        found = [slots[f"{name}{end}"] for end in (_PACKED, _SCALE, _SHAPE)]
    except KeyError as err:
        raise FormatError(f"{where}: tensor {err} is missing") from None
    path, begin, slot = found[2]
    if slot.dtype != "I64" or slot.shape != (2,):
        raise FormatError(f"{where}: {slot.name} is {slot.dtype} {list(slot.shape)}, expected I64 [2]")
    with os.fdopen(open_regular(path), "rb") as file:
        file.seek(begin)
        data = file.read(16)
    shape = (int.from_bytes(data[:8], "little"), int.from_bytes(data[8:], "little"))
    packed, scales = found[0][2], found[1][2]
    groups = scales.shape[1] if len(scales.shape) == 2 else 0
    bits = math.prod(packed.shape) * WORD_BITS // max(math.prod(shape), 1)
    scheme = Scheme(bits, shape[1] // groups if groups > 1 else 0)
    if not groups or scheme.packed(shape) != packed.shape or scheme.scales(shape) != scales.shape:
        raise FormatError(
            f"{where}: {name}: words {list(packed.shape)} and scales {list(scales.shape)} do not fit a weight {list(shape)}"
        )
    return RoundedModule(name, scheme, shape, sum(each.end_byte - each.begin_byte for _, _, each in found[:2]))
