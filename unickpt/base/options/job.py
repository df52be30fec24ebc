"""All options of the package, each declared once.

``Options`` is the value that both adapters work with. DeepSpeed reads it from the ``unickpt`` key of its JSON configuration,
Megatron's training scripts from their command line. ``SteeringOptions`` come from torchrun's ``--rdzv-conf``. The field of an
option holds its whole declaration: the validation of the JSON, the JSON Schema, the flags of ``argparse`` and the tables of
the documentation come from there.
"""

from __future__ import annotations

import argparse
import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from unickpt.base.errors import ConfigError

KEY = "unickpt"
VERIFY = ("always", "sampled", "off")
ON_BUSY = ("wait", "skip", "queue")
MISSING = ("error", "fresh")
WHEN = ("steering", "always", "never")
UNLIMITED = math.inf
GRADIENT_SCHEMES = ("none", "top-k", "random-k", "sign", "powersgd", "fp16", "bf16", "int8")
AUTO = "auto"  # the job chooses the scheme
_DEEPSPEED_ONLY = "Megatron's scripts reduce gradients by themselves"
_CONF = "use torchrun's `--rdzv-conf`"
Section = TypeVar("Section")

_NAMED: Mapping[type[Any], str] = {bool: "true or false", str: "a string", float: "a number", int: "a whole number"}


@dataclass(frozen=True, slots=True)
class Option:
    """The declaration of one option.

    Attributes:
        key: name in the JSON section, and of the field.
        section: JSON section inside ``unickpt``; '' for ``unickpt`` itself.
        default: default value, whose type (bool, int, float or str) is the type of the option. ``UNLIMITED``: no limit.
        help: one sentence without a full stop.
        unit: unit of a number, or ''.
        choices: accepted values; empty for any.
        least, most: bounds of a whole number. A float must be positive.
        flag: flag of Megatron's training scripts, or ''. The flag of a bool sets the opposite of its default.
        no_flag: replacement for a flag in Megatron's training scripts.
        no_key: replacement for a key in DeepSpeed's JSON; '' if the option has a key.
        several: the value is a list with commas. The flag takes its words one by one.
    """

    key: str
    section: str
    default: Any
    help: str
    unit: str
    choices: tuple[str, ...]
    least: int
    most: int | None
    flag: str
    no_flag: str
    no_key: str
    several: bool

    @property
    def kind(self) -> type[Any]:
        return type(self.default)

    @property
    def attribute(self) -> str:
        """Attribute of the namespace that ``argparse`` returns."""
        names = [KEY, self.section, self.key] if (self.section, self.key) != ("timing", "enabled") else [KEY, self.section]
        return "_".join(filter(None, names))

    @property
    def text(self) -> str:
        """The help sentence with the unit."""
        return f"{self.help} ({self.unit})" if self.unit else self.help

    @property
    def flag_text(self) -> str:
        """The help sentence of the flag, which disables an option that is on by default."""
        return f"disable: {self.text}" if self.default is True else self.text

    def checked(self, value: Any, where: str) -> Any:
        """Validate a value and return it.

        Args:
            value: value from JSON or from a command line. A whole number is converted to float if a float is expected.
            where: name of the option in messages.

        Raises:
            ConfigError: the type is wrong, or the value is out of bounds or not one of ``choices``.
        """
        if self.kind is float and type(value) is int:
            value = float(value)
        if type(value) is not self.kind:
            raise ConfigError(f"{where} must be {_NAMED[self.kind]}, not {value!r} ({type(value).__name__})")
        if self.kind is float and not value > 0:
            raise ConfigError(f"{where} must be a positive number, not {value!r}")
        if self.kind is int and not self.least <= value <= (value if self.most is None else self.most):
            bounds = f"at least {self.least}" if self.most is None else f"from {self.least} to {self.most}"
            raise ConfigError(f"{where} must be {bounds}, not {value!r}")
        if self.choices and value not in self.choices:
            near = difflib.get_close_matches(str(value), self.choices, n=1, cutoff=0.0)
            raise ConfigError(f'{where} must be one of {", ".join(self.choices)}, not {value!r}; did you mean "{near[0]}"?')
        return value


def _option(
    default: Any,
    help: str,
    *,
    unit: str = "",
    choices: tuple[str, ...] = (),
    least: int = 0,
    most: int | None = None,
    flag: str = "",
    no_flag: str = "",
    no_key: str = "",
    several: bool = False,
) -> Any:
    """Return the dataclass field of an option. Without ``flag`` and ``no_flag`` the flag is derived from the field name."""
    declared = {
        "help": help, "unit": unit, "choices": choices, "least": least, "most": most, "flag": flag, "no_flag": no_flag,
        "no_key": no_key, "several": several,
    }  # fmt: skip
    return field(default=default, metadata=declared)


@dataclass(frozen=True, slots=True)
class TimingOptions:
    """Recording and diagnosis of collectives."""

    enabled: bool = _option(False, "record every collective of the job", flag="--unickpt-timing")
    watch: bool = _option(
        True,
        "start an agent on every host, which logs the rank that the others wait for",
        flag="--unickpt-timing-no-watch",
    )
    device: bool = _option(
        False,
        "time NCCL's calls on the device by CUDA events, so that slow ranks are found on GPUs; costs a call 40 to 80 us",
    )
    layers_every: int = _option(
        0,
        "measure the times of each layer in one step out of this number, for `unickpt plan`, and to find slow ranks in the "
        "first steps; 0: never",
    )
    metrics_port: int = _option(
        0,
        "port on which the agent of rank 0's host serves Prometheus metrics (/metrics, no password); 0 disables it",
        most=65535,
    )
    metrics_address: str = _option("127.0.0.1", "address on which metrics_port listens; 0.0.0.0 (IPv6: ::) admits other hosts")
    folder: str = _option("", "directory of the ring files; empty: a directory in shared memory, one for each job")
    records: int = _option(65_536, "number of records in the ring of each rank, 96 bytes each", least=1)


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """Checkpoints in the memory of the hosts, between those on disk."""

    to_disk_every: int = _option(
        0, "save into the memory of the hosts, and each time after this number of saves to disk; 0 disables the memory tier"
    )
    replicas: int = _option(1, "number of other hosts that hold a copy of each file")
    generations: int = _option(2, "number of checkpoints that stay in memory, at least 2", least=2, most=8)
    gigabytes: float = _option(
        UNLIMITED, "memory per host for all checkpoints and copies; a save that does not fit goes to disk", unit="GB"
    )
    copy_megabytes_per_second: float = _option(UNLIMITED, "bandwidth of the copies to another host", unit="MB/s")
    folder: str = _option("/dev/shm", "directory in memory (tmpfs) that holds the checkpoints")


@dataclass(frozen=True, slots=True)
class CompressionOptions:
    """Compression of gradients between the ranks, with error feedback. The residuals are part of a checkpoint."""

    scheme: str = _option(
        "none", "form in which gradients travel between the ranks; none: as DeepSpeed sends them; auto: the job chooses it",
        choices=(*GRADIENT_SCHEMES, AUTO),
        no_flag=_DEEPSPEED_ONLY,
    )  # fmt: skip
    ratio: float = _option(0.01, "share of the elements that top-k and random-k send", no_flag=_DEEPSPEED_ONLY)
    rank: int = _option(2, "columns of the factors of powersgd", least=1, no_flag=_DEEPSPEED_ONLY)
    block: int = _option(256, "number of elements with a common scale in int8", least=1, no_flag=_DEEPSPEED_ONLY)
    error_feedback: bool = _option(
        True, "add what a step did not send to the gradient of the next step", no_flag=_DEEPSPEED_ONLY
    )
    least_elements: int = _option(1024, "smaller parameters travel as float32", no_flag=_DEEPSPEED_ONLY)
    seed: int = _option(0, "seed of random-k and of the first factors of powersgd", no_flag=_DEEPSPEED_ONLY)


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a job. The defaults suit most jobs."""

    enabled: bool = _option(False, "save and load universal checkpoints", no_flag="use `--ckpt-format unickpt`")
    verify: str = _option(
        "always",
        "verify checksums on load: of all data read, or (sampled) of completely needed and of a sample of partly needed data",
        choices=VERIFY,
    )
    read_once_per_host: bool = _option(
        True,
        "read data that several ranks of a host need once, and share it through memory",
        flag="--unickpt-no-read-once",
    )
    restore_rng: bool = _option(
        True,
        "restore the Python, NumPy and torch random number generators of every rank",
        no_flag="Megatron's `--no-load-rng` disables it",
    )
    non_persistent_buffers: bool = _option(
        False,
        "also save and restore buffers registered with persistent=False",
        no_flag="the modules' `sharded_state_dict` decides which buffers are saved",
    )
    allow_pickle: bool = _option(
        False, "unpickle opaque objects on load, which runs code from the checkpoint; for trusted checkpoints only"
    )
    name: str = _option(
        "",
        "name of the model, if a job has several, such as `actor`: no save or resume takes the checkpoint of another name",
        no_flag="a job of the scripts has one model",
    )
    fall_back: bool = _option(True, "if the latest checkpoint is damaged and no other is named, load the newest intact one")
    missing_state: str = _option(
        "error",
        "what a load does about optimizer states that the checkpoint lacks, as of parameters that were frozen at the save "
        "or of another optimizer class: fail, or start these states fresh, keep the others and list both",
        choices=MISSING,
    )
    async_save: bool = _option(
        False,
        "return from a save after the state is copied to host memory, and write in the background",
        no_flag="use Megatron's `--async-save`",
    )
    sync_save: bool = _option(
        False,
        "return from a save only when the checkpoint is durable, even with --async-save",
        no_key="saves are synchronous unless `async_save` is true",
    )
    on_busy: str = _option(
        "wait", "what a save does while an earlier one is being written: wait for it, skip itself, or queue", choices=ON_BUSY
    )
    staging_gigabytes: float = _option(
        UNLIMITED, "host memory per rank for copies of the state; the rest is written before the save returns", unit="GB"
    )
    pinned_staging: bool = _option(True, "copy the state from a GPU behind training, into page-locked host memory")
    write_megabytes_per_second: float = _option(UNLIMITED, "write bandwidth per rank", unit="MB/s")
    direct_io: bool = _option(True, "bypass the page cache when writing data, if the file system supports it")
    keep_last: int = _option(0, "number of most recent checkpoints to keep in the folder after a save; 0 keeps all")
    keep_every: int = _option(0, "with keep_last, also keep checkpoints whose step is a multiple of this number; 0: none")
    upload_to: str = _option("", "URL or path to which each committed checkpoint is copied in the background")
    grace_seconds: float = _option(25.0, "time that a process waits for its save after SIGTERM", unit="s")
    load_dialect: str = _option(
        "",
        "dialect of a checkpoint of another framework whose metadata does not name its model family: family or dialect file",
    )
    accept_changed: str = _option(
        "",
        "arguments of the model that may differ from those of the checkpoint, although the load would be refused: tensors of "
        "the same name and shape are loaded",
        several=True,
        no_key="tensors are compared, not arguments",
    )
    timeout_seconds: float = _option(1800.0, "time that a rank waits for other ranks before its save or load fails", unit="s")
    resume_from: str = _option(
        "",
        "folder of the checkpoints that a job saves and resumes from: `keep_global_batch` reads the batch there, and "
        "`ds_unickpt.resume_or_start` loads from it",
        no_flag="use Megatron's `--load`",
    )
    keep_global_batch: str = _option(
        "steering",
        "when the number of ranks changes, keep the global batch by another gradient accumulation: under "
        "`torchrun --rdzv-backend unickpt`, always, or never",
        choices=WHEN,
        no_flag="Megatron's `--global-batch-size` keeps it",
    )
    batch_tolerance: float = _option(
        0.0,
        "with keep_global_batch, share by which the global batch may differ from `train_batch_size` on ranks that cannot make "
        "it exactly, as in 0.01; 0: an error names the numbers of ranks that can",
        no_flag="Megatron's scripts need an exact batch",
    )
    auto_resume: str = _option(
        "steering",
        "without resume_from_checkpoint, Trainer resumes from the newest complete checkpoint in output_dir: after a restart by "
        "`torchrun --rdzv-backend unickpt`, always, or never",
        choices=WHEN,
        no_flag="use Megatron's `--load`",
    )
    precision: str = _option("", "file of `unickpt plan precision`: layers that compute in bf16 on slow ranks")
    compression: CompressionOptions = field(default=CompressionOptions())
    memory: MemoryOptions = field(default=MemoryOptions())
    timing: TimingOptions = field(default=TimingOptions())


@dataclass(frozen=True, slots=True)
class SteeringOptions:
    """Options of ``torchrun --rdzv-backend unickpt --rdzv-conf KEY=VALUE,...``.

    All but ``host`` and ``history`` are equal on all hosts.
    """

    host: str = _option("", "name of this host in the job; empty: the host name", no_flag=_CONF)
    secret_file: str = _option(
        "", "file with the secret that the hosts of the job share; empty: the `--rdzv-id` is the secret", no_flag=_CONF
    )
    history: str = _option(
        "",
        "folder for the history of the job, for `unickpt report`: a file for each agent; empty: a folder in shared memory",
        no_flag=_CONF,
    )
    webhook: str = _option(
        "", "URL, or file with the URL, to which the leader posts orders, verdicts and lost rounds as JSON", no_flag=_CONF
    )
    metrics_port: int = _option(
        0,
        "port on which each torchrun agent serves metrics of the steering for Prometheus; 0: none",
        most=65_535,
        no_flag=_CONF,
    )
    metrics_address: str = _option("127.0.0.1", "address to which that port is bound", no_flag=_CONF)
    sizes: str = _option("", "allowed numbers of hosts, as in `4+6+8`; empty: all from MIN to MAX", no_flag=_CONF)
    order: str = _option(
        "", "hosts in the order of their ranks, as in `node2+node0+node1`; empty: the order of their names", no_flag=_CONF
    )
    grow: bool = _option(True, "start a larger round as soon as more hosts arrive", no_flag=_CONF)
    lone: bool = _option(
        False, "go on with half of the hosts or fewer, even if the others may still run behind a failed network", no_flag=_CONF
    )
    join_seconds: float = _option(30.0, "time that the first round waits for more than MIN hosts", unit="s", no_flag=_CONF)
    arrive_seconds: float = _option(
        60.0, "time that a round waits for hosts that are still stopping their workers", unit="s", no_flag=_CONF
    )
    expiry_seconds: float = _option(
        15.0, "time without a sign of life after which a host is out; a process that ended is noticed at once", unit="s",
        no_flag=_CONF,
    )  # fmt: skip
    settle_seconds: float = _option(1.0, "time that a round waits for more hosts before it grows", unit="s", no_flag=_CONF)
    boundary_seconds: float = _option(
        1800.0, "time that a round waits for the next checkpoint of unickpt before it grows, so that no steps are lost; a job "
        "that does not save with unickpt does not wait", unit="s", no_flag=_CONF,
    )  # fmt: skip
    act: bool = _option(True, "give the orders of the policy; false: only log them", no_flag=_CONF)
    dead_seconds: float = _option(
        45.0, "time that a rank is dead, and torchrun has not started it again, before its host is out; torchrun gives "
        "the other workers of the host 30 s to end", unit="s", no_flag=_CONF,
    )  # fmt: skip
    stopped_seconds: float = _option(60.0, "time that a process is stopped before its host is out", unit="s", no_flag=_CONF)
    hang_seconds: float = _option(
        300.0, "time that others wait for a rank that does not move before its host is out", unit="s", no_flag=_CONF
    )
    pause_factor: float = _option(
        3.0, "hang_seconds is at least this multiple of the longest pause that the job has recovered from", no_flag=_CONF
    )
    still_seconds: float = _option(
        30.0, "time without any movement of a hung process before its host is out", unit="s", no_flag=_CONF
    )
    loop_seconds: float = _option(
        420.0, "time that a hung process stays in the same functions, while it uses the processor, before its host is out; "
        "with NCCL, all ranks end after 600 s", unit="s", no_flag=_CONF,
    )  # fmt: skip
    retries: int = _option(3, "restarts in a row without progress before the job is stopped", no_flag=_CONF)
    fruitful_seconds: float = _option(
        1800.0, "time after which a round counts as progress, whatever its steps are", unit="s", no_flag=_CONF
    )
    slow: str = _option("log", "what is done about a slow host", choices=("log", "evict"), no_flag=_CONF)
    slow_seconds: float = _option(300.0, "time that a host is slow before it is out", unit="s", no_flag=_CONF)
    check_seconds: float = _option(20.0, "time limit of a check of both ends of a link", unit="s", no_flag=_CONF)
    bad_link: str = _option(
        "log", "what is done if only one link is bad, so that no host is at fault: only log it, or blame the host with the "
        "higher rank", choices=("log", "park"), no_flag=_CONF,
    )  # fmt: skip
    self_check: bool = _option(
        True, "a host that returns, or was out for a fault, measures itself before it is admitted", no_flag=_CONF
    )
    check_share: float = _option(
        0.5, "share of the median of the other hosts that it must reach in compute, memory and loop-back", no_flag=_CONF
    )
    out_seconds: float = _option(300.0, "time that a host stays out; doubles each time", unit="s", no_flag=_CONF)
    longest_out_seconds: float = _option(86_400.0, "longest time that a host stays out", unit="s", no_flag=_CONF)


SECTIONS: Mapping[str, type[Any]] = {
    "": Options,
    "compression": CompressionOptions,
    "memory": MemoryOptions,
    "timing": TimingOptions,
}


def declared(section: str | None = None) -> Iterator[Option]:
    """Yield the declarations in order.

    Args:
        section: '' or the name of a JSON section; None for all sections.
    """
    for name, kind in SECTIONS.items():
        if section in (None, name):
            yield from _declarations(name, kind)


def declared_for_steering() -> Iterator[Option]:
    """Yield the declarations of ``SteeringOptions`` in order."""
    return _declarations("steering", SteeringOptions)


def _declarations(section: str, kind: type[Any]) -> Iterator[Option]:
    return (_declaration(section, item.name, item.default, item.metadata) for item in fields(kind) if item.metadata)


def _declaration(section: str, key: str, default: Any, metadata: Mapping[str, Any]) -> Option:
    flag = metadata["flag"]
    if not flag and not metadata["no_flag"]:
        words = [KEY, section, "no" if default is True else "", key.replace("_", "-")]
        flag = "--" + "-".join(filter(None, words))
    return Option(key=key, section=section, default=default, **{**metadata, "flag": flag})


# ---------------------------------------------------------------- JSON


def from_json(section: Any) -> Options:
    """Return the options from the value of the ``unickpt`` key.

    Raises:
        ConfigError: the value is not an object, has an unknown option (the message names the nearest valid one), or a
            value has a wrong type or is out of bounds.
    """
    return _section("", section)  # type: ignore[no-any-return]


def _section(name: str, section: Any) -> Any:
    path = ".".join(filter(None, [KEY, name]))
    if name == "compression" and isinstance(section, str):
        section = {"scheme": section}
    if not isinstance(section, Mapping):
        raise ConfigError(f'"{path}" must be an object such as {{"enabled": true}}, not {section!r}')
    known = {option.key: option for option in declared(name) if not option.no_key}
    inside = [] if name else [other for other in SECTIONS if other]
    values: dict[str, Any] = {}
    for key, value in section.items():
        if key in inside:
            values[key] = _section(key, value)
        elif key in known:
            values[key] = known[key].checked(value, f'"{path}.{key}"')
        else:
            raise _unknown(key, [*known, *inside], f"{path}.")
    return SECTIONS[name](**values)


def _unknown(key: Any, names: Sequence[str], path: str = "") -> ConfigError:
    near = difflib.get_close_matches(str(key), names, n=1, cutoff=0.0)
    return ConfigError(f'"{path}{key}" is not an option; did you mean "{path}{near[0]}"? Known: {", ".join(names)}')


def schema(name: str = "") -> dict[str, Any]:
    """Return the JSON Schema of a section; '' for the value of the ``unickpt`` key."""
    types = {bool: "boolean", int: "integer", float: "number", str: "string"}
    properties: dict[str, Any] = {}
    for option in declared(name):
        if option.no_key:
            continue
        about: dict[str, Any] = {"type": types[option.kind], "description": option.text}
        about |= {} if option.default == UNLIMITED else {"default": option.default}
        about |= {"enum": list(option.choices)} if option.choices else {}
        about |= {"exclusiveMinimum": 0} if option.kind is float else {}
        about |= {"minimum": option.least} if option.kind is int else {}
        about |= {"maximum": option.most} if option.most is not None else {}
        properties[option.key] = about
    properties |= {} if name else {other: schema(other) for other in SECTIONS if other}
    kinds = ["object", "string"] if name == "compression" else "object"  # the name of a scheme stands for the section
    return {"type": kinds, "additionalProperties": False, "properties": properties}


# ---------------------------------------------------------------- command line


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of Megatron's training scripts to their parser, as the group ``unickpt``."""
    group = parser.add_argument_group(KEY, "universal checkpoints (--ckpt-format unickpt) and timing of collectives")
    for option in declared():
        if not option.flag:
            continue
        how: dict[str, Any] = {"type": _parsed(option), "metavar": option.kind.__name__.upper()}
        if option.kind is bool:
            how = {"action": "store_false" if option.default else "store_true"}
        elif option.choices:
            how = {"choices": option.choices}
        elif option.several:
            how |= {"nargs": "+", "metavar": "NAME"}
        words = option.flag_text.replace("%", "%%")
        group.add_argument(option.flag, dest=option.attribute, default=option.default, help=words, **how)


def _parsed(option: Option) -> Any:
    def parse(text: str) -> Any:
        try:
            return option.checked(option.kind(text), option.flag)
        except ConfigError as err:
            raise argparse.ArgumentTypeError(str(err)) from None

    parse.__name__ = option.kind.__name__  # argparse shows this name in its error message
    return parse


def from_flags(arguments: Any, **native: Any) -> Options:
    """Return the options of a parsed command line.

    Args:
        arguments: namespace of ``argparse``. None, or a namespace without the flags, gives the defaults.
        native: values of options without a flag, by key.
    """
    values: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    for option in declared():
        if option.flag:
            value = getattr(arguments, option.attribute, option.default)
            values[option.section][option.key] = ",".join(value) if option.several and not isinstance(value, str) else value
    memory, timing = MemoryOptions(**values["memory"]), TimingOptions(**values["timing"])
    return Options(**{**values[""], **native}, memory=memory, timing=timing)


# ---------------------------------------------------------------- torchrun


def from_rendezvous(configuration: Mapping[str, Any]) -> SteeringOptions:
    """Return the options that torchrun has read from ``--rdzv-conf``.

    Args:
        configuration: strings by key. torchrun's own ``timeout`` is ignored here.

    Raises:
        ConfigError: an option is unknown (the message names the nearest valid one) or its value is wrong.
    """
    known = {option.key: option for option in declared_for_steering()}
    values: dict[str, Any] = {}
    for key, value in configuration.items():
        if key == "timeout":
            continue
        if key not in known:
            raise _unknown(key, list(known), "--rdzv-conf ")
        values[key] = known[key].checked(_typed(known[key].kind, value), f'"--rdzv-conf {key}"')
    return SteeringOptions(**values)


def _typed(kind: type[Any], text: Any) -> Any:
    """Return the value that a string spells; the string itself if it spells none."""
    if kind is bool:
        return {"true": True, "1": True, "false": False, "0": False}.get(str(text).lower(), text)
    try:
        return kind(text)
    except ValueError:
        return text
