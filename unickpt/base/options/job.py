"""The options of a job, each declared once.

``Options`` is the value that both adapters work with. DeepSpeed reads it from the ``unickpt`` key of its JSON configuration
(``json_section``), Megatron's training scripts from their command line (``flags``).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from unickpt.base.options.declared import UNLIMITED, Option, declarations, option, settle

VERIFY = ("always", "sampled", "off")
ON_BUSY = ("wait", "skip", "queue")
ON_BUSY_IN_MEMORY = ("wait", "skip")
MISSING = ("error", "fresh")
WHEN = ("steering", "always", "never")
GRADIENT_SCHEMES = ("none", "top-k", "random-k", "sign", "powersgd", "fp16", "bf16", "int8")
AUTO = "auto"  # the job chooses the scheme


@dataclass(frozen=True, slots=True)
class TimingOptions:
    """Recording and diagnosis of collectives.

    The [reference](../../reference/options.md#timing) explains each field.
    """

    enabled: bool = option(False, "record every collective of the job")
    watch: bool = option(True, "start an agent on every host, which logs the rank that the others wait for")
    device: bool = option(
        False, "time NCCL's calls on the device by CUDA events, so that slow ranks are found on GPUs; costs a call 40 to 80 us"
    )
    layers_every: int = option(
        0,
        "measure the times of each layer in one step out of this number, for `unickpt plan`, and to find slow ranks in the "
        "first steps; 0: never",
    )
    metrics_port: int = option(
        0,
        "port on which the agent of rank 0's host serves Prometheus metrics (/metrics, no password); if it is taken, the next "
        "free one; 0 disables it",
        most=65535,
    )
    metrics_address: str = option("127.0.0.1", "address on which metrics_port listens; 0.0.0.0 (IPv6: ::) admits other hosts")
    metrics_targets: str = option(
        "", "folder in which the agent writes its host and port as a file for Prometheus' `file_sd_configs`; empty: none"
    )
    job: str = option(
        "", "name of the job in its metrics, the label `job_name`; empty: torchrun's `--rdzv-id` where that is no secret"
    )
    folder: str = option("", "directory of the ring files; empty: a directory in shared memory, one for each job")
    records: int = option(65_536, "number of records in the ring of each rank, 96 bytes each", least=1)

    def __post_init__(self) -> None:
        settle(self)


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """Checkpoints in the memory of the hosts, between those on disk.

    The [reference](../../reference/options.md#memory) explains each field.
    """

    to_disk_every: int = option(
        0, "save into the memory of the hosts, and each time after this number of saves to disk; 0 disables the memory tier"
    )
    replicas: int = option(1, "number of other hosts that hold a copy of each file")
    on_busy: str = option(
        "wait",
        "what a save into memory does while the copies of the one before are not complete: wait for them, or skip itself, as "
        "suits a save at every step",
        choices=ON_BUSY_IN_MEMORY,
    )
    generations: int = option(2, "number of checkpoints that stay in memory, at least 2", least=2, most=8)
    gigabytes: float = option(
        UNLIMITED, "memory per host for all checkpoints and copies; a save that does not fit goes to disk", unit="GB"
    )
    copy_megabytes_per_second: float = option(UNLIMITED, "bandwidth of the copies to another host", unit="MB/s")
    folder: str = option("/dev/shm", "directory in memory (tmpfs) that holds the checkpoints")

    def __post_init__(self) -> None:
        settle(self)


@dataclass(frozen=True, slots=True)
class CompressionOptions:
    """Compression of gradients between the ranks, with error feedback. The residuals are part of a checkpoint."""

    scheme: str = option(
        "none",
        "form in which gradients travel between the ranks; none: as DeepSpeed sends them; auto: the job chooses it",
        choices=(*GRADIENT_SCHEMES, AUTO),
    )
    ratio: float = option(0.01, "share of the elements that top-k and random-k send")
    rank: int = option(2, "columns of the factors of powersgd", least=1)
    block: int = option(256, "number of elements with a common scale in int8", least=1)
    error_feedback: bool = option(True, "add what a step did not send to the gradient of the next step")
    least_elements: int = option(1024, "smaller parameters travel as float32")
    seed: int = option(0, "seed of random-k and of the first factors of powersgd")


@dataclass(frozen=True, slots=True)
class WitnessOptions:
    """Comparisons that find numbers that are silently wrong.

    The [guide](../../guides/witness.md) explains the checks.
    """

    every: int = option(0, "compare copies and memory after one step out of this number; 0: no witness")
    checks: str = option(
        "rest,replicas,nonfinite",
        "what is checked: `rest`, `replicas`, `nonfinite`, `outlier`, `buddy`, `self`, `update`",
        several=True,
    )
    batches: str = option("", "folder for micro-batches with NaN whose cause is data or model (DeepSpeed); empty: none")
    act: bool = option(
        False,
        "a verdict about wrong numbers makes later checkpoints suspect, and under `torchrun --rdzv-backend unickpt` takes the "
        "host out",
    )


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a job. The defaults suit most jobs."""

    enabled: bool = option(False, "save and load universal checkpoints")
    verify: str = option(
        "always",
        "verify checksums on load: of all data read, or (sampled) of completely needed and of a sample of partly needed data",
        choices=VERIFY,
    )
    read_once_per_host: bool = option(True, "read data that several ranks of a host need once, and share it through memory")
    restore_rng: bool = option(True, "restore the Python, NumPy and torch random number generators of every rank")
    non_persistent_buffers: bool = option(False, "also save and restore buffers registered with persistent=False")
    allow_pickle: bool = option(
        False, "unpickle opaque objects on load, which runs code from the checkpoint; for trusted checkpoints only"
    )
    name: str = option(
        "", "name of the model, if a job has several, such as `actor`: no save or resume takes the checkpoint of another name"
    )
    fall_back: bool = option(True, "if the latest checkpoint is damaged and no other is named, load the newest intact one")
    missing_state: str = option(
        "error",
        "what a load does about optimizer states that the checkpoint lacks, as of parameters that were frozen at the save "
        "or of another optimizer class: fail, or start these states fresh, keep the others and list both",
        choices=MISSING,
    )
    async_save: bool = option(False, "return from a save after the state is copied to host memory, and write in the background")
    on_busy: str = option(
        "wait", "what a save does while an earlier one is being written: wait for it, skip itself, or queue", choices=ON_BUSY
    )
    staging_gigabytes: float = option(
        UNLIMITED, "host memory per rank for copies of the state; the rest is written before the save returns", unit="GB"
    )
    pinned_staging: bool = option(True, "copy the state from a GPU behind training, into page-locked host memory")
    copy_behind_training: bool = option(
        True, "asynchronous saves and saves into memory copy the state until the next optimizer step; false: before they return"
    )
    write_megabytes_per_second: float = option(UNLIMITED, "write bandwidth per rank", unit="MB/s")
    direct_io: bool = option(True, "bypass the page cache when writing data, if the file system supports it")
    keep_last: int = option(0, "number of most recent checkpoints to keep in the folder after a save; 0 keeps all")
    keep_every: int = option(0, "with keep_last, also keep checkpoints whose step is a multiple of this number; 0: none")
    upload_to: str = option("", "URL or path to which each committed checkpoint is copied in the background")
    grace_seconds: float = option(25.0, "time that a process waits for its save after SIGTERM", unit="s")
    load_dialect: str = option(
        "", "dialect of a checkpoint of another framework whose metadata does not name its model family: family or dialect file"
    )
    timeout_seconds: float = option(1800.0, "time that a rank waits for other ranks before its save or load fails", unit="s")
    resume_from: str = option(
        "",
        "folder of the checkpoints that a job saves and resumes from: `keep_global_batch` reads the batch there, and "
        "`ds_unickpt.resume_or_start` loads from it",
    )
    keep_global_batch: str = option(
        "steering",
        "when the number of ranks changes, keep the global batch by another gradient accumulation: under "
        "`torchrun --rdzv-backend unickpt`, always, or never",
        choices=WHEN,
    )
    batch_tolerance: float = option(
        0.0,
        "with keep_global_batch, share by which the global batch may differ from `train_batch_size` on ranks that cannot make "
        "it exactly, as in 0.01; 0: an error names the numbers of ranks that can",
    )
    auto_resume: str = option(
        "steering",
        "without resume_from_checkpoint, Trainer resumes from the newest complete checkpoint in output_dir: after a restart by "
        "`torchrun --rdzv-backend unickpt`, always, or never",
        choices=WHEN,
    )
    precision: str = option("", "file of `unickpt plan precision`: layers that compute in bf16 on slow ranks")
    compression: CompressionOptions = field(default=CompressionOptions())
    memory: MemoryOptions = field(default=MemoryOptions())
    timing: TimingOptions = field(default=TimingOptions())
    witness: WitnessOptions = field(default=WitnessOptions())


SECTIONS: Mapping[str, type[Any]] = {
    "": Options,
    "compression": CompressionOptions,
    "memory": MemoryOptions,
    "timing": TimingOptions,
    "witness": WitnessOptions,
}


def declared(section: str | None = None) -> Iterator[Option]:
    """Yield the declarations in order: of a section, '' or the name of one, or of all."""
    for name, kind in SECTIONS.items():
        if section in (None, name):
            yield from declarations(kind, name)


def check(**values: Any) -> None:
    """Raise ConfigError if a value is none of the option of ``unickpt`` that has its name."""
    known = _by_key()
    for name, value in values.items():
        known[name].checked(value, name)


@functools.cache
def _by_key() -> Mapping[str, Option]:
    return {each.key: each for each in declared("")}
