"""Traces in the format of ByteDance's straggler analysis: a Parquet file, and a YAML file that describes the job.

Each row is an operation of a worker in a step. The files are at https://github.com/ByteDance-Seed/StragglerAnalysis. Parquet
needs pyarrow (extra ``traces``), which is imported here only.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from unickpt.base.errors import FormatError
from unickpt.base.installation import extra_command
from unickpt.planning.replay.operations import KINDS, Operations

SUFFIX = ".parquet"
_COLUMNS = ("dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id", "mc", "gmc")
Columns = Mapping[str, npt.NDArray[np.generic]]


def read_operations(path: Path, meta: Path | None = None, steps: tuple[int, int] | None = None) -> Operations:
    """Read a trace.

    Args:
        path: Parquet file.
        meta: YAML file with the sizes of the job's groups; default: the data-parallel group is that of the trace.
        steps: first and last step; default: all.

    Raises:
        FormatError: pyarrow is missing, or the files are not such a trace.
        OSError: a file cannot be read.
    """
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError as err:
        raise FormatError(f"{path}: Parquet files need pyarrow: {extra_command('traces')}") from err
    try:
        table = parquet.read_table(path)
    except arrow.ArrowInvalid as err:
        raise FormatError(f"{path}: not a Parquet file ({err})") from err
    missing = [name for name in _COLUMNS if name not in table.column_names]
    if missing:
        raise FormatError(f"{path}: no columns {', '.join(missing)}; a trace of the straggler analysis has them")
    columns = {name: np.asarray(table[name].to_pylist() if name == "optype" else table[name].to_numpy()) for name in _COLUMNS}
    return operations_of_columns(columns, sizes_of(meta.read_text()) if meta is not None else {}, steps, name=str(path))


def sizes_of(text: str) -> dict[str, int]:
    """Return the numbers of a flat YAML file, by name.

    Raises:
        FormatError: a size is not a positive number.
    """
    found = {}
    for line in text.splitlines():
        name, separator, value = line.partition(":")
        if not separator or not name.strip().endswith("_size"):
            continue
        if not value.strip().isdigit() or int(value) < 1:
            raise FormatError(f"{name.strip()} is {value.strip()!r} in the description of the job, not a positive number")
        found[name.strip()] = int(value)
    return found


def operations_of_columns(
    columns: Columns, sizes: Mapping[str, int], steps: tuple[int, int] | None = None, *, name: str = "trace"
) -> Operations:
    """Return the operations of a table.

    Args:
        columns: one array for each column, all of one length: ``dp_rank``, ``stage``, ``rank``, ``step``, ``optype`` (text),
            ``start_ts`` and ``duration`` (seconds), ``seq_id``, ``mc`` and ``gmc``.
        sizes: ``dp_size``, ``pp_size``, ``dsp_size`` as far as they are known.
        steps: first and last step; default: all.
        name: of the trace, for errors.

    Raises:
        FormatError: unknown operations, sizes unlike the description's, or a worker without some operation in some step.
    """
    number = {each: columns[each].astype(np.int64) for each in ("dp_rank", "stage", "rank", "step", "seq_id", "mc", "gmc")}
    kinds = columns["optype"].astype(str)
    kept = np.ones(len(kinds), bool)
    if steps is not None:
        kept = (number["step"] >= steps[0]) & (number["step"] <= steps[1])
    if not kept.any():
        raise FormatError(f"{name}: no operations" if steps is None else f"{name}: no steps from {steps[0]} to {steps[1]}")
    number, kinds = {each: values[kept] for each, values in number.items()}, kinds[kept]
    unknown = sorted(set(kinds.tolist()) - set(KINDS))
    if unknown:
        raise FormatError(f"{name}: unknown operations {', '.join(unknown)}")
    replicas, stages = (int(number[each].max()) + 1 for each in ("dp_rank", "stage"))
    for size, named in ((replicas, "dp_size"), (stages, "pp_size")):
        if sizes.get(named, size) != size:
            raise FormatError(f"{name}: {named} is {sizes[named]} in the description of the job, and {size} in the trace")
    steps_known, step = np.unique(number["step"], return_inverse=True)
    names, kind = np.unique(kinds, return_inverse=True)
    key = np.stack([kind.reshape(-1), number["stage"], number["seq_id"]], axis=1)
    ops, op = np.unique(key, axis=0, return_inverse=True)
    op = op.reshape(-1)
    cell = (op * replicas + number["dp_rank"]) * len(steps_known) + step.reshape(-1)
    shape = (len(ops), replicas, len(steps_known))
    times = np.bincount(cell, minlength=int(np.prod(shape)))
    if (times != 1).any():
        at, replica, where = (int(each) for each in np.unravel_index(int(np.argmax(times != 1)), shape))
        raise FormatError(
            f"{name}: step {steps_known[where]} has {times[times != 1][0]} operations {names[ops[at, 0]]} number "
            f"{ops[at, 2]} of replica {replica} in stage {ops[at, 1]}; one is needed"
        )
    begin, took = np.empty(shape), np.empty(shape)
    begin.reshape(-1)[cell] = columns["start_ts"][kept].astype(np.float64)
    took.reshape(-1)[cell] = columns["duration"][kept].astype(np.float64)
    first = np.full(len(ops), len(op))
    np.minimum.at(first, op, np.where((number["dp_rank"] == 0) & (step.reshape(-1) == 0), np.arange(len(op)), len(op)))
    ranks = np.zeros((replicas, stages), np.int64)
    ranks[number["dp_rank"], number["stage"]] = number["rank"]
    return Operations(
        tuple(names[ops[:, 0]].tolist()), ops[:, 2], ops[:, 1],
        number["mc"][first], number["gmc"][first], begin, took, steps_known, ranks, replicas * sizes.get("dsp_size", 1) > 1,
    )  # fmt: skip
