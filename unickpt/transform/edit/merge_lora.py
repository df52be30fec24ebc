"""Step that merges adapters into the model, as ``merge_and_unload`` of peft does (``merge`` in peft/tuners/lora/layer.py).

    W += (B @ A) * scaling        computed in float32, rounded once, to the dtype of W

This is what peft does after ``PeftModel.from_pretrained``, which casts adapters of half precision to float32
(``autocast_adapter_dtype``, on by default). peft merges a model whose adapters still have half precision in memory in a
different way: it rounds ``(B @ A) * scaling`` to the dtype of the adapters before the addition. ``keep_dtype`` does that.

The product is computed for blocks of at least 64 whole rows. A product of fewer rows may sum in another order, so its bits
may differ from those of the whole matrix.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from unickpt.base.errors import FormatError, MismatchError
from unickpt.base.listing import some
from unickpt.checkpoint.format.boxes import Box
from unickpt.checkpoint.format.dtypes import torch_dtype
from unickpt.transform.convert.readings import Reading
from unickpt.transform.edit.cast import is_float
from unickpt.transform.edit.select import NoOptimizer
from unickpt.transform.edit.table import Table, TableEntry, count_of

PREFIX = "base_model.model."
ADAPTER_CONFIG = "adapter_config.json"
_BASE, SAVED, _ORIGINAL = ".base_layer.", ".modules_to_save.", ".original_module."
_GRID = 64  # rows
# Settings of adapter_config.json that do not change how adapters are merged, or that are handled here. A setting of a
# newer peft that is not listed and not off may change the arithmetic, so it is refused.
_HARMLESS = frozenset((
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying", "eva_config",
    "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform",
    "loftq_config", "lora_alpha", "lora_dropout", "lora_ga_config", "megatron_core", "modules_to_save", "peft_type",
    "peft_version", "qalora_group_size", "r", "rank_pattern", "revision", "runtime_config", "target_modules", "task_type",
    "use_rslora",
))  # fmt: skip
# Values of init_lora_weights that leave the base weights as they are. The others subtract the first product from them.
_PLAIN_STARTS = ("gaussian", "eva", "orthogonal")
_CHANGED_STARTS = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True)
class LoraConfig:
    """The settings of ``adapter_config.json`` that a merge needs.

    Attributes:
        alpha: ``lora_alpha``.
        rank: ``r``, or 0 if it is unknown; the shapes of the adapters then give the rank.
        rslora: scaling is alpha / sqrt(r), not alpha / r.
        transposed: ``fan_in_fan_out``: weights are [in, out], as in GPT-2.
        ranks, alphas: ``rank_pattern``, ``alpha_pattern``: regular expressions of module names, as in peft.
        changed_base: value of ``init_lora_weights`` with which peft changes the base weights when the training starts, or ''.
    """

    alpha: float
    rank: int = 0
    rslora: bool = False
    transposed: bool = False
    ranks: Mapping[str, int] = field(default_factory=dict)
    alphas: Mapping[str, float] = field(default_factory=dict)
    changed_base: str = ""

    @classmethod
    def read(cls, path: Path) -> LoraConfig:
        """Read peft's ``adapter_config.json``.

        Args:
            path: the file, or the folder that holds it.

        Raises:
            FormatError: the file is missing or malformed, or its adapters cannot be merged here.
        """
        if path.is_dir():
            path = path / ADAPTER_CONFIG
            if not path.is_file():
                raise FormatError(f"{path.parent}: has no {ADAPTER_CONFIG}; pass a folder in which peft saved an adapter")
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as err:
            raise FormatError(f"{path}: cannot be read as an adapter_config.json ({err})") from err
        if not isinstance(found, dict) or str(found.get("peft_type", "LORA")).upper() != "LORA":
            kind = found.get("peft_type") if isinstance(found, dict) else type(found).__name__
            raise FormatError(f"{path}: describes {kind!r}; only LoRA adapters can be merged")
        other = sorted(key for key, value in found.items() if value and key not in _HARMLESS)
        if other:
            raise FormatError(f"{path}: {other[0]} is set. Merge such adapters with peft")
        start = found.get("init_lora_weights")
        changed = isinstance(start, str) and start.lower().startswith(_CHANGED_STARTS)
        if isinstance(start, str) and not changed and start.lower() not in _PLAIN_STARTS:
            raise FormatError(
                f"{path}: init_lora_weights is {start!r}. Such adapters are not merged here; merge them with peft"
            )
        try:
            return cls(
                _number(found["lora_alpha"]), int(found["r"]), bool(found.get("use_rslora")), bool(found.get("fan_in_fan_out")),
                {str(key): int(value) for key, value in (found.get("rank_pattern") or {}).items()},
                {str(key): _number(value) for key, value in (found.get("alpha_pattern") or {}).items()},
                str(start) if changed else "",
            )  # fmt: skip
        except (KeyError, TypeError, ValueError, AttributeError) as err:
            raise FormatError(f"{path}: lora_alpha, r or a pattern of them is missing or not a number ({err!r})") from None

    def scaling(self, module: str, rank: int, where: str) -> float:
        """Return the scaling factor of a module.

        Args:
            module: name without ``base_model.model.``.
            rank: rank of its adapters.
            where: name of the checkpoint in messages.

        Raises:
            MismatchError: the configuration has another rank.
        """
        expected = self.ranks.get(_pattern(self.ranks, module), self.rank)
        if expected and expected != rank:
            raise MismatchError(f"{where}: the adapters of {module} have rank {rank}, the configuration has {expected}")
        alpha = self.alphas.get(_pattern(self.alphas, module), self.alpha)
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank


def _number(value: Any) -> float:
    """Return a finite JSON number; an integer stays an integer. Raises ValueError for any other value."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{value!r} is not a number")
    return value


def _pattern(patterns: Mapping[str, Any], module: str) -> str:
    """Return the key of the pattern that matches a module, or the module (``get_pattern_key`` in peft/utils/other.py)."""
    try:
        return next((key for key in patterns if re.match(rf"(.*\.)?({key})$", module)), module)
    except re.error as err:
        raise FormatError(f"a pattern of rank_pattern or alpha_pattern is not a regular expression ({err})") from None


@dataclass(frozen=True)
class MergeLora:
    """Add adapters to their weights. The result has the names and dtypes of the model without adapters.

    Attributes:
        config: settings of the adapters.
        adapter: name of the adapter to merge; '' if there is only one.
        base: weights of the model, if the checkpoint was saved without them (``exclude_frozen_parameters``).
        base_identity: identity of the checkpoint of ``base``; '' without one.
        keep_dtype: round the product to the dtype of the adapters before the addition, as peft does with
            ``autocast_adapter_dtype=False``.
    """

    config: LoraConfig
    adapter: str = ""
    base: Table | None = field(default=None, repr=False, compare=False)
    base_identity: str = ""
    keep_dtype: bool = False

    def apply(self, table: Table) -> Table:
        bare = NoOptimizer().apply(table)
        adapters, rest, adapter = split_adapters(bare, self.adapter)
        model = _plain(bare, rest, adapter)
        if self.base is not None and self.config.changed_base:
            raise MismatchError(
                f"{table.where}: the adapters were initialized with {self.config.changed_base!r}, for which peft changes the "
                f"base weights when the training starts, so they do not fit {self.base.where}; merge them with peft"
            )
        if self.base is not None:
            model = _merge_base(self.base, model, table)
        merged: dict[tuple[str, str], TableEntry] = {}
        stored = {alias: name for alias, name in model.aliases.items()} | {e.info.name: e.info.name for e in model.tensors()}
        for module, (a, b, embedding) in adapters.items():
            name = f"{module}.weight"
            key = (stored.get(name, name), "weight")
            if key not in model.entries:
                reason = "was saved without it (exclude_frozen_parameters)" if table.excluded else "lacks it"
                raise MismatchError(
                    f"{table.where}: the adapter of {module} needs the weight {name}, but the checkpoint {reason}; pass a "
                    "checkpoint of the model with --lora-base (unickpt convert writes one from a transformers model)"
                )
            before = merged.get(key, model.entries[key])
            scaling = self.config.scaling(module, a.info.shape[0] if a.info.shape else 0, table.where)
            delta = _Delta(a, b, scaling, embedding or self.config.transposed, self.keep_dtype)
            if delta.shape != before.info.shape:
                raise MismatchError(
                    f"{table.where}: the adapter of {module} has shape {list(delta.shape)}, its weight has "
                    f"{list(before.info.shape)}" + ("" if embedding else "; set fan_in_fan_out if the weight is transposed")
                )
            if not is_float(before.info.dtype):
                raise MismatchError(
                    f"{table.where}: {name} is {before.info.dtype}: adapters of quantized weights are not merged"
                )
            merged[key] = replace(
                before,
                read=_added(before.read, delta, rounded=embedding),
                origin=before.origin_after(f"adapter of rank {delta.rank} added, times {scaling:g}"),
            )
        entries = [merged.get(entry.info.key, entry) for entry in model.tensors()]
        after = model.with_entries(entries)
        if self.base is not None:
            after = replace(after, model_files=self.base.model_files, described=self.base.described)
        return after.with_done(
            f"{count_of(len(adapters), 'adapter')} merged into {count_of(len(merged), 'weight')}; names are those of the model"
        ).with_left_out(f"adapters: {count_of(2 * len(adapters))}")


@dataclass(frozen=True)
class _Delta:
    """Product of an adapter that is added to its weight.

    Attributes:
        a, b: the two factors, [rank, in] and [out, rank].
        scaling: factor of the product.
        transposed: the weight is the transpose of B @ A.
        keep_dtype: round the product to the dtype of ``b``.
    """

    a: TableEntry
    b: TableEntry
    scaling: float
    transposed: bool
    keep_dtype: bool

    @property
    def rank(self) -> int:
        return self.a.info.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        out, into = self.b.info.shape[0], self.a.info.shape[1]
        return (into, out) if self.transposed else (out, into)

    def rows(self, lo: int, hi: int) -> torch.Tensor:
        """Rows ``[lo, hi)`` and all columns, in float32 (float64 for adapters in float64) unless ``keep_dtype``."""
        first, last = _grid(lo, hi, self.shape[0])
        a, b = self.a.info.shape, self.b.info.shape
        if self.transposed:
            left, right = Box.whole(b), Box((0, first), (a[0], last - first))
        else:
            left, right = Box((first, 0), (last - first, b[1])), Box.whole(a)
        dtype = torch_dtype(self.b.info.dtype)
        exact = torch.promote_types(torch.float32, torch_dtype(self.a.info.dtype)) if dtype.itemsize < 8 else torch.float64
        product = self.b.read(left).view(left.shape).to(exact) @ self.a.read(right).view(right.shape).to(exact)
        product = (product.T if self.transposed else product) * self.scaling
        return (product.to(dtype) if self.keep_dtype else product)[lo - first : hi - first]


def _grid(lo: int, hi: int, rows: int) -> tuple[int, int]:
    """Return a range of rows around ``[lo, hi)`` whose product equals, bit for bit, those rows of the full product.

    It has at least ``_GRID`` rows, and leaves either none or at least ``_GRID`` rows after it.
    """
    first, last = lo // _GRID * _GRID, min(-(-hi // _GRID) * _GRID, rows)
    if rows - last < _GRID:
        last = rows
    if last - first < _GRID:
        first = max(last // _GRID * _GRID - _GRID, 0)
    return first, last


def _added(read: Reading, delta: _Delta, *, rounded: bool) -> Reading:
    """Return the reading of a weight with its adapter.

    ``rounded``: round the product to the dtype of the weight before the addition, as peft does for embeddings.
    """

    def merged(box: Box) -> torch.Tensor:
        weight = read(box).view(box.shape)
        lo, extent = box.start[0], box.shape[0]
        columns = slice(box.start[1], box.stop[1])
        more = delta.rows(lo, lo + extent)[:, columns]
        return weight.add_(more.to(weight.dtype) if rounded else more).reshape(-1)

    return merged


def split_adapters(table: Table, chosen: str) -> tuple[dict[str, tuple[TableEntry, TableEntry, bool]], list[TableEntry], str]:
    """Separate adapters from other tensors.

    Returns:
        Adapters as (A, B, whether it belongs to an embedding) by module name, all other tensors, and the adapter name.

    Raises:
        MismatchError: there is no adapter, the choice is ambiguous, or a part of an adapter is missing or unknown.
    """
    halves: dict[str, dict[str, tuple[str, TableEntry]]] = {}
    rest: list[TableEntry] = []
    names: set[str] = set()
    for entry in table.tensors():
        module, part, adapter = _adapter(entry.info.name)
        if not part:
            rest.append(entry)
        else:
            names.add(adapter)
            halves.setdefault(f"{module}\0{adapter}", {})[part] = (module, entry)
    if not names:
        raise MismatchError(f"{table.where}: has no adapters (names like {PREFIX}...lora_A.default.weight)")
    if not chosen and len(names) > 1:
        raise MismatchError(f"{table.where}: has the adapters {', '.join(sorted(names))}; choose one with --lora-adapter")
    if chosen and chosen not in names:
        raise MismatchError(f"{table.where}: has no adapter {chosen!r}; it has {', '.join(sorted(names))}")
    adapter = chosen or min(names)
    found = {}
    for key, parts in halves.items():
        module, name = key.split("\0")
        if name != adapter:
            continue
        embedding = "lora_embedding_A" in parts
        pair = [parts.get(f"lora_embedding_{half}" if embedding else f"lora_{half}") for half in "AB"]
        if pair[0] is None or pair[1] is None or len(parts) != 2:
            raise MismatchError(
                f"{table.where}: the adapter of {module} has {', '.join(sorted(parts))}, expected lora_A and lora_B"
            )
        (_, a), (_, b) = pair[0], pair[1]
        if len(a.info.shape) != 2 or len(b.info.shape) != 2 or a.info.shape[0] != b.info.shape[1] or not a.info.shape[0]:
            raise MismatchError(
                f"{table.where}: the adapter of {module} has shapes {list(b.info.shape)} @ {list(a.info.shape)}; only adapters "
                "of linear layers and embeddings can be merged"
            )
        found[module.removeprefix(PREFIX)] = (a, b, embedding)
    return found, rest, adapter


def _adapter(name: str) -> tuple[str, str, str]:
    """Return module, part (``lora_A``, ...) and adapter of a name; empty strings if it does not belong to an adapter."""
    found = re.fullmatch(r"(.+)\.(lora_(?:embedding_)?[AB])\.([^.]+)(?:\.weight)?", name)
    if found is not None:
        return found[1], found[2], found[3]
    if re.search(r"(^|\.)lora_|\.token_adapter\.", name):
        raise MismatchError(f"{name}: is an unknown part of an adapter; merge it with peft")
    return "", "", ""


def _plain(table: Table, rest: list[TableEntry], adapter: str) -> Table:
    """Return the model without adapters, under the names that it has without peft."""
    less = table.with_entries(rest)
    known = {
        name for name in (*(entry.info.name for entry in less.tensors()), *less.aliases, *less.aliases.values(), *less.excluded)
    }
    modules = {name.partition(SAVED)[0] for name in known if f"{SAVED}{adapter}." in name}
    new = {name: None if _adapter(name)[1] else _own_name(name, adapter, modules) for name in known}
    entries = [
        replace(entry, info=replace(entry.info, name=name))
        for entry in less.tensors()
        if (name := new[entry.info.name]) is not None
    ]
    aliases = {
        alias: name
        for before, of in less.aliases.items()
        if (alias := new[before]) is not None and (name := new[of]) is not None and alias != name
    }
    excluded = tuple(sorted({name for each in less.excluded if (name := new[each]) is not None}))
    return replace(less, entries=less.with_objects(entries), aliases=aliases, excluded=excluded)


def _own_name(name: str, adapter: str, modules: Collection[str]) -> str | None:
    """Return the name of a parameter in the model without peft.

    Args:
        name: name of a parameter that does not belong to an adapter.
        adapter: adapter that is merged.
        modules: modules of ``modules_to_save`` that the adapter has trained.

    Returns:
        None if the parameter belongs to another adapter, or is replaced by a trained module.
    """
    module, original, parameter = name.partition(_ORIGINAL)
    if original:
        return None if module in modules else f"{module.removeprefix(PREFIX)}.{parameter}"
    module, saved, parameter = name.partition(SAVED)
    if saved:
        own, _, parameter = parameter.partition(".")
        return f"{module.removeprefix(PREFIX)}.{parameter}" if own == adapter else None
    return name.removeprefix(PREFIX).replace(_BASE, ".")


def _merge_base(base: Table, model: Table, table: Table) -> Table:
    """Return a base model with the parameters of it that were trained besides adapters."""
    own = {entry.info.key: entry for entry in model.tensors()}
    plain = NoOptimizer().apply(base)
    unknown = [name for name, _ in own if (name, "weight") not in plain.entries and name not in plain.aliases]
    if unknown:
        raise MismatchError(f"{base.where}: the model has no {some(unknown)}, which {table.where} has")
    over = {}
    for key, entry in own.items():
        target = (plain.aliases.get(key[0], key[0]), "weight")
        if plain.entries[target].info.shape != entry.info.shape:
            raise MismatchError(
                f"{key[0]} has shape {list(entry.info.shape)} in {table.where} and {list(plain.entries[target].info.shape)} in "
                f"{base.where}"
            )
        over[target] = replace(entry, info=replace(entry.info, name=target[0]))
    missing = [name for name in model.excluded if (plain.aliases.get(name, name), "weight") not in plain.entries]
    if missing:
        raise MismatchError(f"{base.where}: has no {some(missing)}, which {table.where} was saved without")
    entries = [over.get(entry.info.key, entry) for entry in plain.tensors()]
    objects = {key: entry for key, entry in model.entries.items() if entry.info.kind == "object"}
    return replace(
        model, entries={**{entry.info.key: entry for entry in entries}, **objects}, aliases=plain.aliases,
        excluded=plain.excluded, identity=(*model.identity, *base.identity), inputs=(*model.inputs, *base.inputs),
        writer=replace(model.writer, model=model.writer.model or base.writer.model),
    ).with_done(f"{count_of(len(plain.tensors()) - len(over))} taken from {base.where}")  # fmt: skip
