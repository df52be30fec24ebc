"""Kinds of states of a job, of its hosts, and of ends of rounds."""

from __future__ import annotations

import enum


class JobPhase(enum.Enum):
    """Phase of the job."""

    GATHERING = "gathering"  # hosts arrive; no workers run, or those of the last round are being stopped
    OPENING = "opening"  # members are chosen and connect to the stores of the round
    RUNNING = "running"  # workers run


class Ending(enum.Enum):
    """Why a round has ended."""

    NONE = ""
    WORKERS = "workers failed"
    PARKED = "host parked"
    RESTART = "restart by order"
    GONE = "host lost"
    LEAVING = "host told to end"
    JOINED = "hosts joined"
    LATE = "host did not connect"
    LEADER = "leader lost"


class Standing(enum.Enum):
    """What a host does."""

    RUNNING = "running"
    STOPPING = "stopping"  # the agent has not arrived yet: it stops the workers of the last round
    ARRIVED = "arrived"
    SPARE = "spare"
    PARKED = "parked"
    GONE = "gone"
