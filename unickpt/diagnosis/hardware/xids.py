"""What the numbers mean that NVIDIA's driver writes to the log of the kernel (Xid).

After NVIDIA's catalogue (docs.nvidia.com/deploy/xid-errors). What it says to do at once decides: a reset of the GPU or of the
machine means broken hardware, a restart of the application an error of the program, nothing means nothing.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Bearing(enum.Enum):
    """What an event says about its host."""

    BROKEN = "broken"  # hardware has failed: the host needs a reset, a repair or a look
    LIMITED = "limited"  # the host cannot give what is asked for: memory, processors, cooling, a file server
    PROGRAM = "program"  # mostly an error of the program
    NOTHING = "nothing"  # handled, or the consequence of something else


@dataclass(frozen=True, slots=True)
class Xid:
    """Meaning of a number.

    Attributes:
        name: what it is.
        bearing: what it says about the host.
    """

    name: str
    bearing: Bearing


_BROKEN = {
    46: "GPU stopped processing",
    48: "uncorrectable memory error",
    54: "no auxiliary power",
    61: "internal microcontroller breakpoint",
    62: "internal microcontroller halt",
    64: "a memory row cannot be replaced",
    74: "NVLink error",
    79: "fallen off the bus",
    95: "uncontained memory error",
    109: "context switch timed out",
    110: "security fault",
    119: "GPU system processor does not answer",
    120: "GPU system processor error",
    136: "link training failed",
    140: "unrecovered memory error",
    143: "initialization error",
    144: "NVLink error",
    145: "NVLink error",
    146: "NVLink error",
    147: "NVLink error",
    148: "NVLink error",
    149: "NVLink error",
    150: "NVLink error",
    151: "key rotation error",
    155: "NVLink error",
    158: "fatal timeout",
    167: "fatal PCIe timeout",
    168: "reduced memory capacity",
    169: "internal microcontroller halt",
    171: "uncorrectable memory error",
    172: "uncorrectable memory error",
}
_LIMITED = {94: "contained memory error, only its process is affected", 156: "memory was retired, to be replaced by a reset"}
_PROGRAM = {
    8: "GPU stopped processing",
    11: "invalid commands",
    13: "graphics engine exception",
    25: "invalid commands",
    31: "memory page fault",
    32: "invalid commands",
    39: "copy engine exception",
    40: "copy engine exception",
    41: "copy engine exception",
    43: "GPU stopped processing for this process",
    68: "video decoder exception",
    69: "graphics engine class error",
    80: "corrupted commands",
    137: "NVLink privilege error",
}
# handled by the driver, or a consequence: corrected or replaced memory, cleanup after another error, what is about power or
# firmware alone
_NOTHING = frozenset(
    {14, 37, 38, 44, 45, 63, 66, 67, 92, 93, 106, 107, 121, 141, 152, 153, 154, 157, 159, 160, 161, 162, 163, 164, 165}
)
_NEED_FATAL = frozenset(range(144, 151))  # NVLink of the fifth generation: the line says whether it is fatal


def xid(code: int) -> Xid:
    """Return the meaning of a number. One that is not in the table is reported and moves nothing."""
    if code in _BROKEN:
        return Xid(_BROKEN[code], Bearing.BROKEN)
    if code in _PROGRAM:
        return Xid(_PROGRAM[code], Bearing.PROGRAM)
    if code in _NOTHING:
        return Xid("", Bearing.NOTHING)
    return Xid(_LIMITED.get(code, "see NVIDIA's catalogue"), Bearing.LIMITED)


def counts(code: int, line: str) -> bool:
    """Return whether a line with this number is an event at all."""
    if code in _NEED_FATAL and " fatal" not in line.lower().replace("non-fatal", "").replace("nonfatal", ""):
        return False
    return xid(code).bearing is not Bearing.NOTHING
