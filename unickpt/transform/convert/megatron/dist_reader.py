"""Reader of Megatron's ``torch_dist`` checkpoints: tensors in files of torch.distributed.checkpoint, the rest in ``common.pt``.

Their content is defined by megatron/core/dist_checkpointing/strategies/torch.py and common.py, ``sharded_state_dict`` in
optimizer/distrib_optimizer.py and ``generate_state_dict`` in megatron/training/checkpointing.py. The source has the same
tensors, objects and hyperparameters as a checkpoint that the Megatron adapter writes (``dist_checkpointing/capture.py``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from unickpt.base.errors import FormatError, NotACheckpointError
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.checkpoint.format.manifest import OptimizerRecord, ParameterGroup
from unickpt.transform.convert.limits import bounded
from unickpt.transform.convert.megatron.common_state import (
    GROUPS_UNKNOWN,
    arguments_of,
    content_of,
    dimensions,
    group_of,
    hyperparameters,
    name_of_optimizer,
    objects_of,
    optimizers_in,
    owners,
    step_of,
    writer_of,
)
from unickpt.transform.convert.megatron.keys import BACKEND, MASTER, WEIGHT, is_expert, tensor_of
from unickpt.transform.convert.pickles.lazy_tensor import OpenFiles
from unickpt.transform.convert.pickles.plain_values import members
from unickpt.transform.convert.pickles.regular_files import read_json
from unickpt.transform.convert.pickles.safe_pickle import load
from unickpt.transform.convert.pipeline import Source
from unickpt.transform.convert.torch_dcp.files import METADATA, DcpTable, StoredTensor, is_far, portions_of

CONFIG, COMMON = "metadata.json", "common.pt"
_BUCKETS = re.compile(r"^(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+\.(gbuf_idx_\d+\.)?")


def backend_of(folder: Path) -> str:
    """Return the backend in Megatron's metadata of a folder (``torch_dist``, ``fsdp_dtensor``, ...), or ''."""
    try:
        return str(read_json(folder / CONFIG).get("sharded_backend", ""))
    except (OSError, FormatError):
        return ""


@bounded
def megatron_dist(folder: Path, files: OpenFiles, *, also: Sequence[str] = ()) -> Source:
    """Open the iteration folder (``iter_0001000``) of a checkpoint of ``--ckpt-format torch_dist``.

    Arguments and errors: see ``bounded``. It is also a FormatError if the optimizer is in a form that only the same job reads.
    """
    if backend_of(folder) != BACKEND or not (folder / METADATA).is_file():
        raise NotACheckpointError(f"{folder}: has no {METADATA} and no {CONFIG} with the backend {BACKEND}")
    return _TorchDistReader(folder, files, also).source()


class _TorchDistReader:
    """Builder of the source from the files of an iteration."""

    def __init__(self, folder: Path, files: OpenFiles, also: Sequence[str]) -> None:
        self.folder = folder
        self.left_out: list[str] = []
        common = load(folder / COMMON, files, also=also)
        if not isinstance(common, dict):
            raise FormatError(f"{folder / COMMON}: contains a {type(common).__name__}, expected a dictionary")
        self._common: Mapping[str, Any] = common
        self._optimizer = list(optimizers_in(common.get("optimizer")))
        self._table = DcpTable(folder, files, also)
        self._refuse_buckets()

    def _refuse_buckets(self) -> None:
        """Refuse optimizer states in the form of memory buckets: the files do not contain the position of a parameter."""
        bucket = next((name for name in self._table.tensors if _BUCKETS.match(name)), None)
        if bucket is not None:
            kind = content_of(self._common).get("distrib_optim_sharding_type") or "dp_reshardable"
            raise FormatError(
                f"{self.folder}: the state of the distributed optimizer has the form {kind} ({bucket}), memory buckets without "
                "the positions of the parameters. Load it in Megatron under the same tensor and pipeline parallel sizes, and "
                "save it again with --dist-ckpt-optim-fully-reshardable (or with --ckpt-format unickpt, which needs no "
                "conversion)"
            )

    # ---------------------------------------------------------------- tensors

    def source(self) -> Source:
        named = self._named()
        misplaced = self._misplaced(named)
        if misplaced:
            self.left_out.append(misplaced)
            named = {key: stored for key, stored in named.items() if key[1] == WEIGHT}
        trained = list(dict.fromkeys(name for name, state in named if state != WEIGHT))
        tensors = list(self._tensors(named, trained))
        portions, empty = portions_of(tensors)
        derived = [info for info, _, _ in tensors if info.derived_from is not None]
        arguments = arguments_of(self._common, self.left_out.append)
        return Source(
            "Megatron torch_dist", portions, writer_of(arguments), step=step_of(self._common),
            tensors=[*derived, *empty], optimizer=self._record(named, trained),
            objects=objects_of(self._common, arguments, self._optimizer, bool(trained), self.left_out.append),
            shared_objects=self._shared(), left_out=self.left_out,
        )  # fmt: skip

    def _named(self) -> dict[tuple[str, str], StoredTensor]:
        found: dict[tuple[str, str], StoredTensor] = {}
        for key, stored in self._table.tensors.items():
            name = tensor_of(key)
            if name in found and not stored.is_same_as(found[name]):
                raise FormatError(f"{self.folder}: {key} and {found[name].name} differ, but both are {name[1]} of {name[0]}")
            found[name] = stored
        return found

    def _misplaced(self, named: Mapping[tuple[str, str], StoredTensor]) -> str:
        """Return why the states of the optimizer are those of other elements, by a sample of the masters; '' if they are not.

        The form ``fully_reshardable`` gathers the buckets of a buffer without their padding
        (``get_parameter_state_dp_zero``), and takes each parameter from where it is with the padding
        (``sharded_param_state_fully_reshardable`` of optimizer/distrib_optimizer.py, 0.16.1).
        """
        for (name, state), master in named.items():
            weight = named.get((name, WEIGHT))
            if state == MASTER and weight is not None and weight.shape == master.shape and is_far(weight, master):
                return (
                    f"states of the optimizer: {name} is not near its master, so they are those of other elements. Megatron "
                    "misplaces and loses states in this form if buckets of gradients are padded (--overlap-grad-reduce, or "
                    "tied embeddings and several stages, with a number of data parallel ranks that is no power of two, or with "
                    "small layers). Save with --ckpt-format unickpt"
                )
        return ""

    def _tensors(
        self, named: Mapping[tuple[str, str], StoredTensor], trained: Sequence[str]
    ) -> Iterator[tuple[TensorInfo, StoredTensor, StoredTensor | None]]:
        """Yield every tensor in the form of the adapter: a trained parameter has a master, and its weight is derived.

        An optimizer that updates the weights directly has no masters in Megatron's files: the masters are the weights.
        """
        for name in trained:
            weight = named.get((name, WEIGHT))
            if weight is None:
                raise FormatError(f"{self.folder}: has optimizer states of {name}, but not its weight")
            if (name, MASTER) not in named:
                yield TensorInfo(name, MASTER, weight.dtype, weight.shape, "parameter"), weight, None
        of_optimizer = set(trained)
        for (name, state), stored in named.items():
            weight = named.get((name, WEIGHT), stored)
            if stored.shape != weight.shape:
                raise FormatError(
                    f"{self.folder}: {state} of {name} has shape {list(stored.shape)}, the weight has {list(weight.shape)}; "
                    "megatron-core before 0.15 flattens such states: load the checkpoint with that version, and save it with "
                    "--ckpt-format unickpt"
                )
            kind = "parameter" if state in (WEIGHT, MASTER) else "optimizer"
            if state == WEIGHT and name in of_optimizer:
                origin = named.get((name, MASTER), stored)
                yield TensorInfo(name, state, stored.dtype, stored.shape, kind, MASTER), stored, origin
            else:
                yield TensorInfo(name, state, stored.dtype, stored.shape, kind), stored, None

    # ---------------------------------------------------------------- objects

    def _shared(self) -> dict[str, Any]:
        """Return the objects by position. Megatron wraps each in a list (``_mcore_to_torch_sharded_object`` in torch.py)."""
        found: dict[str, Any] = {}
        for key, place in self._table.objects.items():
            held = self._table.load(place, key)
            if not isinstance(held, list) or len(held) != 1:
                raise FormatError(f"{place.path}: {key} is {held!r:.80}, expected a list of one object")
            found |= members({key: held[0]}, "", self.left_out.append)
        return found

    # ---------------------------------------------------------------- hyperparameters

    def _record(self, named: Mapping[tuple[str, str], StoredTensor], trained: Sequence[str]) -> OptimizerRecord | None:
        """Return the hyperparameters and the step.

        The files do not contain the assignment of parameters to groups. For Megatron's default groups it is known
        (``get_standard_config_overrides``: no weight decay for biases and 1-D parameters, separate groups for experts).
        Other groups are kept without parameters; Megatron matches them by their identity keys.
        """
        groups = [group for optimizer in self._optimizer for group in optimizer.groups]
        if not groups:
            if trained:
                self.left_out.append(f"hyperparameters: {COMMON} has none, although there are optimizer states")
            return None
        held = [hyperparameters(group) for group in groups]
        owner_of = owners(held, {name: (dimensions(name, named[name, WEIGHT].shape), is_expert(name)) for name in trained})
        if owner_of is None:
            self.left_out.append(GROUPS_UNKNOWN)
            owner_of = {}
        parameter_groups = tuple(
            group_of(values, (name for name in trained if owner_of.get(name) == at)) for at, values in enumerate(held)
        )
        steps = {step for optimizer in self._optimizer for step in optimizer.steps}
        if len(steps) > 1:
            self.left_out.append(
                f"steps of the optimizer: there are several ({sorted(steps)}), and their parameters are unknown"
            )
        scalars = tuple(ParameterGroup({"step": step}, tuple(trained)) for step in steps) if len(steps) == 1 and trained else ()
        return OptimizerRecord(name_of_optimizer({state for _, state in named}, held), parameter_groups, scalars)
