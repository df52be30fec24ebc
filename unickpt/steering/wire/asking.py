"""What the command line asks the agents of a job: the table of hosts, and orders of a person.

Each agent keeps its address and the job's key in a folder in shared memory that only its user can enter, so that a person on a
host of the job needs neither.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import secrets
import shutil
import socket
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unickpt.base.errors import ConfigError
from unickpt.base.private_files import make_folder, own_folders, read_text, replacing
from unickpt.steering.state.membership import Membership
from unickpt.steering.wire.codec import SteeringError, state_from_json
from unickpt.steering.wire.probing import Probe

FILE, LONGEST = "agent", 4096
ASKED_AT_ONCE, ANSWERS_S = 256, 5.0
HOPS = 5  # from an agent that does not lead to the leader


@dataclass(frozen=True, slots=True)
class Contact:
    """An agent of a job.

    Attributes:
        address: ``host:port``.
        key: key of the job.
    """

    address: str
    key: bytes


def publish(parent: Path, contact: Contact) -> Path:
    """Write a contact for this user's command line, and return its folder, to be removed at the end.

    Raises:
        OSError: the folder cannot be created.
    """
    folder = parent / f"{_prefix()}{secrets.token_hex(16)}"
    make_folder(folder)
    with replacing(folder / FILE) as file:
        file.write(json.dumps({"address": contact.address, "key": contact.key.hex()}).encode())
    return folder


def published(parent: Path) -> list[Contact]:
    """Return the contacts of living agents on this host, one for each job. Those of agents that have ended are removed.

    All are asked at once, the newest first, and those that do not answer within ``ANSWERS_S`` are left out: an agent that was
    killed may have had an address that is gone, and nothing refuses the connection.
    """
    folders = sorted(own_folders(parent, _prefix()), key=_made_s, reverse=True)
    pool = ThreadPoolExecutor(min(ASKED_AT_ONCE, max(len(folders), 1)), "unickpt-ask")
    asked = [pool.submit(_living, folder) for folder in folders]
    wait(asked, ANSWERS_S)
    pool.shutdown(wait=False, cancel_futures=True)
    answers = [one.result() for one in asked if one.done() and not one.cancelled()]
    return list({contact.key: contact for contact in reversed(answers) if contact is not None}.values())


def _made_s(folder: Path) -> float:
    with contextlib.suppress(OSError):
        return folder.stat().st_mtime
    return 0.0  # its agent has just removed it


def _living(folder: Path) -> Contact | None:
    """Return the contact in a folder if its agent answers. The folder is removed if nothing listens there any more."""
    with contextlib.suppress(ValueError, KeyError, TypeError, EOFError, OSError, SteeringError):
        said = json.loads(read_text(folder / FILE, LONGEST))
        contact = Contact(str(said["address"]), bytes.fromhex(said["key"]))
        try:
            Probe(contact.key).greet(contact.address, "")
        except ConnectionRefusedError:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            return contact
    return None


def the_only(parent: Path) -> Contact:
    """Return the contact of this user's only job on this host.

    Raises:
        ConfigError: there is none, or there are several.
    """
    found = published(parent)
    if len(found) == 1:
        return found[0]
    several = "several jobs of yours have" if found else "no job of yours has"
    raise ConfigError(f"{several} an agent on this host: pass --rdzv-endpoint and --rdzv-id as to torchrun")


def hosts(contact: Contact) -> tuple[Membership, float]:
    """Return the state of a job, and the time on the clock of its times.

    Raises:
        SteeringError: no agent of the job answers.
    """
    answer = _asked(contact, {"kind": "hosts"})
    now_s = time.monotonic()
    return state_from_json(answer.get("state"), now_s), now_s


def order(contact: Contact, action: str, host: str) -> tuple[str, str]:
    """Park or admit a host. Return what was done, and what a person must know about it.

    Raises:
        SteeringError: no agent of the job answers, or it refuses the order.
    """
    by = f"{_user()}@{socket.gethostname()}"
    request = {"kind": "order", "id": secrets.token_hex(8), "action": action, "host": host, "by": by}
    answer = _asked(contact, request)
    if "done" not in answer:
        raise SteeringError(str(answer.get("error", "the order was refused")))
    return str(answer["done"]), str(answer.get("note", ""))


def _asked(contact: Contact, request: dict[str, Any]) -> dict[str, Any]:
    """Ask the leader, which any agent names."""
    address, probe = contact.address, Probe(contact.key)
    for _ in range(HOPS):
        try:
            answer = probe.ask(address, request)
        except EOFError:
            raise SteeringError(
                f"the agent at {address} refuses the request: --rdzv-id and the secret must be those of the job"
            ) from None
        except OSError as err:
            raise SteeringError(f"no agent answers at {address}: {err}") from err
        if "leader" not in answer:
            return answer
        if not answer["leader"]:
            break
        address = str(answer["leader"])
    raise SteeringError("the job has no leader at the moment; run the same command again")


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.geteuid())


def _prefix() -> str:
    return f"unickpt-steering-{os.geteuid()}-"
