"""Reader of state dicts saved by ``torch.distributed.checkpoint``: FSDP, DTensor, torchtitan, or a single process.

Names are defined by torch/distributed/checkpoint/state_dict.py. A weight has its own name after the keys of its dictionaries
(``model.``, ``app.model.``). An optimizer state is ``<optimizer>.state.<parameter>.<state>``. A hyperparameter is
``<optimizer>.param_groups.<parameter>.<key>`` or, if not flattened, ``<optimizer>.param_groups.<number>.<key>``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from unickpt import __version__
from unickpt.base.errors import FormatError
from unickpt.base.listing import some
from unickpt.checkpoint.format.dtype_names import itemsize_bytes
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.checkpoint.format.manifest import OptimizerRecord, Writer
from unickpt.checkpoint.state.optimizer_record import grouped
from unickpt.transform.convert.huggingface.files import configuration
from unickpt.transform.convert.limits import bounded
from unickpt.transform.convert.optimizers import class_of_states
from unickpt.transform.convert.parameter_order import NoOrderError, match_names
from unickpt.transform.convert.pickles.lazy_tensor import OpenFiles
from unickpt.transform.convert.pickles.plain_values import NotPlainError, plain
from unickpt.transform.convert.pipeline import Source
from unickpt.transform.convert.torch_dcp.files import MAX_OBJECT_BYTES, METADATA, DcpTable, StoredTensor, portions_of
from unickpt.transform.dialects.model_facts import Model
from unickpt.transform.dialects.translated_checkpoint import HUGGINGFACE

# Prefix of an optimizer without hyperparameters.
_STATES = re.compile(r"^((?:.*\.)?(?:optim|optimizer|optimizers|optimizer_state|optim_state)\.)state\.")
_GROUPS = re.compile(r"^((?:.*?\.)??)param_groups\.")
_MODELS = ("model", "module", "state_dict")
_STEPS = ("step", "iteration", "global_step")
_SMALL_BYTES = 1 << 20  # up to this size, a tensor outside model and optimizer becomes an object
# As in ds_unickpt/saving/capture.py: options of the implementation.
_NOT_HYPERPARAMETERS = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})


def is_dcp(folder: Path) -> bool:
    """Return whether ``torch.distributed.checkpoint`` wrote a folder."""
    return folder.is_dir() and any(folder.glob(f"*{METADATA}"))


@bounded
def dcp(folder: Path, files: OpenFiles, *, also: Sequence[str] = ()) -> Source:
    """Open a folder with ``.metadata`` and ``*.distcp`` of ``FileSystemWriter``. Arguments and errors: see ``bounded``."""
    return _DcpReader(folder, files, also).source()


class _DcpReader:
    """Builder of the source from the table of a folder."""

    def __init__(self, folder: Path, files: OpenFiles, also: Sequence[str]) -> None:
        self.folder = folder
        self.left_out: list[str] = []
        self._table = DcpTable(folder, files, also)
        keys = [*self._table.tensors, *self._table.objects]
        self._roots = sorted({m[1] for key in keys if (m := _GROUPS.match(key) or _STATES.match(key))}, key=len, reverse=True)
        rest = {key: stored for key, stored in self._table.tensors.items() if self._root_of(key) is None}
        self._prefix = self._models_prefix(rest)
        self.weights = {key.removeprefix(self._prefix): each for key, each in rest.items() if self._in_model(key)}
        self._others = {key: stored for key, stored in rest.items() if not self._in_model(key)}
        self._numbers: dict[tuple[str, str], str] = {}  # (root, number) -> parameter
        self._hyperparameters = {root: self._values(root) for root in self._roots}

    # ---------------------------------------------------------------- names

    def _root_of(self, key: str) -> str | None:
        """Return the prefix of the optimizer of a key, such as ``optim.``, or None."""
        return next((root for root in self._roots if key.startswith((f"{root}state.", f"{root}param_groups."))), None)

    def _rests(self, what: str, among: Iterable[str]) -> Iterator[tuple[str, str, str]]:
        """Yield ``(key, optimizer, rest)`` of every key ``<optimizer><what>.<rest>``."""
        for key in among:
            root = self._root_of(key)
            if root is not None and key.startswith(f"{root}{what}."):
                yield key, root, key.removeprefix(f"{root}{what}.")

    def _container(self, key: str) -> str:
        """Return the prefix of the dictionaries of a key, such as ``app.model.``."""
        path = self._table.paths.get(key, (key,))[:-1]
        return "".join(f"{part}." for part in path)

    def _models_prefix(self, rest: Mapping[str, StoredTensor]) -> str:
        """Return the prefix of the tensors of the model, from the names in the optimizer, or from the dictionaries."""
        named = [each.rpartition(".")[0] for _, _, each in self._rests("state", self._table.tensors)]
        named = [name for name in dict.fromkeys(named) if name and not name.isdigit()]
        if named:
            ends = {key[: -len(named[0])] for key in rest if key == named[0] or key.endswith(f".{named[0]}")}
            hits = Counter({prefix: sum(f"{prefix}{name}" in rest for name in named) for prefix in ends})
            if hits:
                most = max(hits.values())
                return min((prefix for prefix, count in hits.items() if count == most), key=len)
        containers = Counter(self._container(key) for key in rest)
        found = [each for each in containers if each.rstrip(".").rpartition(".")[2] in _MODELS]
        if len(found) == 1:
            return found[0]
        return next(iter(containers)) if len(containers) == 1 else ""

    def _in_model(self, key: str) -> bool:
        if not key.startswith(self._prefix):
            return False
        return bool(self._prefix) or self._container(key) == ""

    # ---------------------------------------------------------------- source

    def source(self) -> Source:
        if not self.weights:
            raise FormatError(f"{self.folder}: has no tensors of a model (found {', '.join([*self._table.tensors][:6])})")
        self._number_parameters()
        states, scalars = self._states()
        tensors: list[tuple[TensorInfo, StoredTensor, StoredTensor | None]] = []
        for name, stored in self.weights.items():
            kind = "parameter" if stored.dtype.startswith(("F", "BF")) or (name in scalars) else "buffer"
            tensors.append((TensorInfo(name, "weight", stored.dtype, stored.shape, kind), stored, None))
        for (name, state), stored in states.items():
            tensors.append((TensorInfo(name, state, stored.dtype, stored.shape, "optimizer"), stored, None))
        found = self._objects()
        for key, stored in self._others.items():
            if key not in found:  # too large for an object: stored under its full key
                tensors.append((TensorInfo(key, "weight", stored.dtype, stored.shape, "buffer"), stored, None))
        portions, empty = portions_of(tensors)
        record = self._record({state for _, state in states}, scalars)
        return Source(
            "torch.distributed.checkpoint", portions, self._writer(), step=self._step(found, scalars), tensors=empty,
            optimizer=record, objects={"client_state": found}, left_out=self.left_out,
        )  # fmt: skip

    def _writer(self) -> Writer:
        model = Model.of_config(configuration(self.folder)).as_json()
        return Writer("torch", self._table.version, __version__, torch.__version__, HUGGINGFACE, {}, model)

    def _step(self, found: Mapping[str, Any], scalars: Mapping[str, Mapping[str, Any]]) -> int:
        """Return the step counter of the training, or else the step of the optimizer."""
        counters = [_plain(value) for key, value in found.items() if key.rpartition(".")[2] in _STEPS]
        numbers = {int(value) for value in counters if isinstance(value, int) and value >= 0}
        if len(numbers) == 1:
            return numbers.pop()
        steps = [each["step"] for each in scalars.values() if isinstance(each.get("step"), (int, float))]
        return max((int(step) for step in steps if step >= 0), default=0)

    # ---------------------------------------------------------------- the optimizer

    def _split(self, root: str, rest: str) -> tuple[str, str] | None:
        """Return parameter and state (or hyperparameter) of ``<parameter>.<state>``, or None if there is no such parameter."""
        head, _, state = rest.rpartition(".")
        name = self._numbers.get((root, head), head)
        return (name, state) if name in self.weights else None

    def _number_parameters(self) -> None:
        """Assign names to the numbered parameters of an optimizer by their shapes, if the assignment is unique."""
        for root in self._roots:
            shapes: dict[int, tuple[int, ...]] = {}
            for key, each, rest in self._rests("state", self._table.tensors):
                number, _, state = rest.partition(".")
                if each == root and number.isdigit() and state != "step":
                    shapes[int(number)] = self._table.tensors[key].shape
            groups = [value for key, value in self._hyperparameters[root].items() if re.fullmatch(r"\d+\.params", key)]
            if not shapes or not groups or any(not isinstance(number, int) for group in groups for number in group):
                continue
            try:
                wanted = [[shapes[number] for number in group] for group in groups]
                found = match_names({name: stored.shape for name, stored in self.weights.items()}, wanted)
            except (KeyError, NoOrderError) as err:
                why = f"{err} has no state" if isinstance(err, KeyError) else str(err)
                self.left_out.append(f"{root}state: its parameters have numbers instead of names, and {why}")
                continue
            for group, names in zip(groups, found, strict=True):
                self._numbers |= {(root, str(number)): name for number, name in zip(group, names, strict=True)}

    def _states(self) -> tuple[dict[tuple[str, str], StoredTensor], dict[str, dict[str, Any]]]:
        """Return the tensor states, and the scalar states by parameter."""
        tensors: dict[tuple[str, str], StoredTensor] = {}
        scalars: dict[str, dict[str, Any]] = {}
        unknown: list[str] = []
        for key, root, rest in self._rests("state", [*self._table.tensors, *self._table.objects]):
            place = self._split(root, rest)
            if place is None:
                unknown.append(key)
                continue
            name, state = place
            stored = self._table.tensors.get(key)
            if place in tensors or state in scalars.get(name, {}):
                raise FormatError(f"{self.folder}: {key} is a duplicate of the {state} of {name}")
            if stored is not None and not (stored.numel == 1 and (state == "step" or stored.shape != self.weights[name].shape)):
                tensors[place] = stored
                continue
            try:
                value = _plain(self._value(key) if stored is None else stored.read())
                if not isinstance(value, (int, float, bool, type(None))):
                    raise NotPlainError(f"{key}: is a {type(value).__name__}, expected a number")
                scalars.setdefault(name, {})[state] = value
            except NotPlainError as err:
                self.left_out.append(str(err))
        if unknown:
            self.left_out.append(f"{some(unknown, most=4)}: states without a tensor of the model")
        return tensors, scalars

    def _values(self, root: str) -> dict[str, Any]:
        """Return the values of the keys ``<optimizer>param_groups.<rest>`` by ``<rest>``."""
        found = {}
        for key, each, rest in self._rests("param_groups", [*self._table.objects, *self._table.tensors]):
            if each == root:
                try:
                    stored = self._table.tensors.get(key)
                    found[rest] = self._value(key) if stored is None else _plain(stored.read())
                except NotPlainError as err:
                    self.left_out.append(str(err))
        return found

    def _record(self, states: set[str], scalars: Mapping[str, Mapping[str, Any]]) -> OptimizerRecord | None:
        if not self._roots:
            return None
        by_parameter: dict[str, dict[str, Any]] = {}
        for root in self._roots:
            values = self._hyperparameters[root]
            members = {rest.partition(".")[0]: value for rest, value in values.items() if re.fullmatch(r"\d+\.params", rest)}
            for rest, value in values.items():
                number, _, key = rest.partition(".")
                if number in members and "." not in key:
                    names = [self._numbers.get((root, str(each)), str(each)) for each in members[number]]
                    held = [name for name in names if name in self.weights]
                else:
                    place = self._split(root, rest)
                    held, key = ([place[0]], place[1]) if place is not None else ([], key)
                if not held and key not in _NOT_HYPERPARAMETERS:
                    self.left_out.append(f"{root}param_groups.{rest}: hyperparameter without a tensor of the model")
                for name in held:
                    by_parameter.setdefault(name, {})
                    if key not in _NOT_HYPERPARAMETERS:
                        by_parameter[name][key] = value
        if not by_parameter and not scalars:
            return None
        return OptimizerRecord(
            class_of_states(states), grouped(by_parameter), grouped({name: each for name, each in scalars.items() if each})
        )

    # ---------------------------------------------------------------- objects

    def _value(self, key: str) -> Any:
        """Return an object. Raises NotPlainError if only its own code can read it."""
        place = self._table.objects[key]
        if place.size_bytes > MAX_OBJECT_BYTES:
            raise NotPlainError(f"{key}: is an object of {place.size_bytes:,} bytes, the limit is {MAX_OBJECT_BYTES:,}")
        return plain(self._table.load(place, key), key)

    def _objects(self) -> dict[str, Any]:
        """Return the objects and small tensors outside model and optimizer, by key."""
        found: dict[str, Any] = {}
        for key in self._table.objects:
            if self._root_of(key) is not None:
                continue
            try:
                found[key] = self._value(key)
            except NotPlainError as err:
                self.left_out.append(str(err))
        for key, stored in self._others.items():
            if stored.numel * itemsize_bytes(stored.dtype) <= _SMALL_BYTES:
                found[key] = stored.read()
        return found


def _plain(value: Any) -> Any:
    """Return the number in a one-element tensor; other values are returned unchanged."""
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
