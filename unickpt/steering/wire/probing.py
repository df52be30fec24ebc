"""Looks at other agents: single requests, and proof that an agent's process lives or has ended."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from unickpt.steering.wire.codec import SteeringError, dial

DIAL_S = 2.0


class Proof(enum.Enum):
    """What a look at an agent's address shows."""

    ALIVE = "alive"
    ENDED = "ended"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer to a greeting.

    Attributes:
        proof: whether the process lives.
        term, version: of its copy of the state.
        leads: whether it is the leader.
        contact: address of the leader that it is in contact with; ''.
    """

    proof: Proof
    term: int = 0
    version: int = 0
    leads: bool = False
    contact: str = ""


class Probe:
    """Asks other agents of the job."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def ask(self, address: str, request: dict[str, Any], timeout_s: float = DIAL_S) -> dict[str, Any]:
        """Return the answer to one request, which may take ``timeout_s`` seconds.

        Raises:
            EOFError: the agent refuses the request, or ends.
            SteeringError: the answer is malformed or not authentic.
            OSError: the agent cannot be reached.
        """
        frames = dial(address, self._key, DIAL_S)
        try:
            frames.settimeout(timeout_s)
            frames.send(request)
            return frames.receive()
        finally:
            frames.close()

    def greet(self, address: str, incarnation: str) -> Answer:
        """Return what an agent says about itself. Another incarnation proves that the one that is meant has ended.

        Raises:
            EOFError, SteeringError, OSError: as ``ask``.
        """
        answer = self.ask(address, {"kind": "hello"})
        same = not incarnation or answer.get("incarnation") == incarnation
        return Answer(
            Proof.ALIVE if same else Proof.ENDED, int(answer.get("term", 0)), int(answer.get("version", 0)),
            answer.get("leads") is True, str(answer.get("contact", "")),
        )  # fmt: skip

    def look(self, address: str, incarnation: str) -> Answer:
        """Return whether a process lives. Only its own machine can prove that it does not."""
        try:
            return self.greet(address, incarnation)
        except ConnectionRefusedError:
            return Answer(Proof.ENDED)
        except (OSError, EOFError, SteeringError, ValueError, TypeError):
            return Answer(Proof.UNKNOWN)
