"""What kind of failure an exception is, and what helps: mend the program, start again, or start again on another host.

A table of rules, the first one that applies counts. A file extends it (``rules_from``): its rules come first.
This module is used while the interpreter ends, in a process that may have only what torch imports.
"""

from __future__ import annotations

import enum
import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from unickpt.base.errors import ConfigError

VARIABLE = "UNICKPT_FAILURES"  # in the environment: file with further rules
_LONGEST = 4096  # characters of a message that are searched


class FailureKind(enum.Enum):
    """What has failed."""

    PROGRAM = "program"
    MEMORY = "memory"  # more was asked for than there is
    DEVICE = "device"
    CONNECTION = "connection"  # to another process, which may have ended
    STORAGE = "storage"
    ASKED = "asked"  # somebody has ended it
    KILLED = "killed"  # without being asked first, such as by the kernel
    UNKNOWN = "unknown"


class Remedy(enum.Enum):
    """What helps."""

    STOP = "stop"  # a restart meets the same error
    RESTART = "restart"
    EVICT = "evict"  # restart without the host


@dataclass(frozen=True, slots=True)
class FailureRule:
    """One row of the table.

    Attributes:
        error: regular expression that a whole class name must match: that of the exception, or of one of its bases. Of a
            process that no exception has ended, the name of the signal, such as ``SIGSEGV``.
        message: regular expression to be found in the message; '' for any.
        kind: what has failed.
        remedy: what helps.
    """

    error: str
    message: str
    kind: FailureKind
    remedy: Remedy


_CONNECTIONS = (
    r"onnection (closed|reset|refused|was lost)|onnectFullMesh|roken pipe|ocket (T|t)imeout|timed out waiting|"
    r"emote process exited|\[.*gloo[/\\].*\]"
)
_MISSING = r"out of memory|can't allocate memory|annot allocate memory|CUBLAS_STATUS_ALLOC_FAILED"
_LOST_DEVICE = r"\bXid\b|uncorrectable|\bECC\b|fallen off the bus|NVLink|device (is )?(lost|unavailable)|hardware|busy or unav"
_OF_PROGRAM = (
    "TypeError|NameError|AttributeError|LookupError|ImportError|SyntaxError|ArithmeticError|AssertionError|ValueError|"
    "NotImplementedError|RecursionError|BufferError|ConfigError|PicklingError|UnpicklingError"
)
_MISUSE = (
    r"[Ss]hape|[Ss]ize of tensor|size mismatch|[Ee]xpected|must match|not implemented for|requires? grad|inplace operation|"
    r"second time|index out of range|[Ii]nvalid|Error\(s\) in loading state_dict"
)
RULES = (
    FailureRule("KeyboardInterrupt|SIGTERM|SIGINT|SIGHUP", "", FailureKind.ASKED, Remedy.RESTART),
    FailureRule("OutOfMemoryError|MemoryError", "", FailureKind.MEMORY, Remedy.STOP),
    FailureRule(".*", _MISSING, FailureKind.MEMORY, Remedy.STOP),
    FailureRule(".*", r"device-side assert", FailureKind.PROGRAM, Remedy.STOP),
    FailureRule("RuntimeError", _LOST_DEVICE, FailureKind.DEVICE, Remedy.EVICT),
    FailureRule("AcceleratorError|RuntimeError", r"CUDA (driver )?error|HIP error|cuDNN error|CUBLAS|NCCL.*unhandled cuda",
                FailureKind.DEVICE, Remedy.RESTART),
    FailureRule("DistError|DistBackendError|DistNetworkError|DistStoreError|CoordinationError", "",
                FailureKind.CONNECTION, Remedy.RESTART),
    FailureRule("ConnectionError|TimeoutError", "", FailureKind.CONNECTION, Remedy.RESTART),
    FailureRule("RuntimeError", rf"NCCL|nccl|{_CONNECTIONS}", FailureKind.CONNECTION, Remedy.RESTART),
    FailureRule("OSError", r"No space left|quota exceeded|Read-only file system", FailureKind.STORAGE, Remedy.STOP),
    FailureRule("OSError", r"Input/output error|Stale file handle|Remote I/O", FailureKind.STORAGE, Remedy.EVICT),
    FailureRule("FileNotFoundError|PermissionError|IsADirectoryError|NotADirectoryError|FileExistsError", "",
                FailureKind.PROGRAM, Remedy.STOP),
    FailureRule("OSError|StorageError", "", FailureKind.STORAGE, Remedy.RESTART),
    FailureRule(_OF_PROGRAM, "", FailureKind.PROGRAM, Remedy.STOP),
    FailureRule("RuntimeError", _MISUSE, FailureKind.PROGRAM, Remedy.STOP),
    FailureRule("SIGKILL", "", FailureKind.KILLED, Remedy.RESTART),
    FailureRule("SIGABRT", "", FailureKind.CONNECTION, Remedy.RESTART),  # of NCCL's watchdog, and of gloo
    FailureRule("SIGBUS", "", FailureKind.MEMORY, Remedy.STOP),
    FailureRule("SIG[A-Z0-9]+", "", FailureKind.PROGRAM, Remedy.RESTART),
)  # fmt: skip
_UNKNOWN = FailureRule("", "", FailureKind.UNKNOWN, Remedy.RESTART)


def rule_for(names: Iterable[str], message: str, rules: Sequence[FailureRule] = RULES) -> FailureRule:
    """Return the first rule that applies; one of unknown kind, with a restart, if none does.

    Args:
        names: class names of the exception and its bases; or the name of a signal.
        message: message of the exception.
        rules: the table.
    """
    known, text = tuple(names), message[:_LONGEST]
    for rule in rules:
        if any(re.fullmatch(rule.error, name) for name in known) and re.search(rule.message, text):
            return rule
    return _UNKNOWN


def rules_from(path: Path) -> tuple[FailureRule, ...]:
    """Return the rules of a file, and then the table.

    The file is a JSON list of objects ``{"error": "MyError", "message": "", "kind": "program", "do": "stop"}``; ``message`` and
    ``kind`` may be left out.

    Raises:
        ConfigError: the file cannot be read, or a rule is wrong. The message says which.
    """
    try:
        entries = json.loads(path.read_text())
        if not isinstance(entries, list):
            raise ValueError("not a list of rules")
    except (OSError, ValueError, RecursionError) as err:
        raise ConfigError(f"{path}: the rules on failures cannot be read ({err})") from err
    return (*(_rule(path, at, entry) for at, entry in enumerate(entries)), *RULES)


def own_rules() -> tuple[FailureRule, ...]:
    """Return the rules of the file that the environment names, and then the table.

    Raises:
        ConfigError: as for ``rules_from``.
    """
    named = os.environ.get(VARIABLE, "")
    return rules_from(Path(named)) if named else RULES


def _rule(path: Path, at: int, entry: object) -> FailureRule:
    try:
        if not isinstance(entry, dict) or entry.keys() - {"error", "message", "kind", "do"} or "error" not in entry:
            raise ValueError("expected error, message, kind and do")
        rule = FailureRule(
            str(entry["error"]), str(entry.get("message", "")), FailureKind(entry.get("kind", "unknown")),
            Remedy(entry.get("do", "restart")),
        )  # fmt: skip
        re.compile(rule.error), re.compile(rule.message)
    except (ValueError, re.error) as err:
        raise ConfigError(f"{path}: rule {at + 1}: {err}") from err
    return rule
