"""What the command line needs to look into the memory of a job: a file in the folder of the job on each host.

The file has the addresses of all keepers with their secrets. Only the user of the job can read it, as the folder.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from unickpt.base.errors import ConfigError, FormatError, NotACheckpointError, StorageError, UnickptError
from unickpt.base.private_files import TOKEN, own_folders, read_text, replacing
from unickpt.checkpoint.checkpoint_folder import read_manifest
from unickpt.checkpoint.format.layout import RankFiles
from unickpt.checkpoint.format.manifest import Manifest
from unickpt.checkpoint.memory.generations import ABOUT_FILE, Inventory, folder_of, missing, number_of
from unickpt.checkpoint.memory.host_folder import HostFolder, folder_name, folder_prefix, parse_about
from unickpt.checkpoint.memory.hosts import JobHosts
from unickpt.checkpoint.memory.keeper_client import KeeperClient
from unickpt.checkpoint.memory.peer_storage import PeerStorage

FILE, _LONGEST = "job.json", 16 << 20
_ANSWER_S = 3.0  # of a keeper


@dataclass(frozen=True, slots=True)
class HostContact:
    """One host of a job.

    Attributes:
        name: host name.
        ranks: its ranks.
        address: of its keeper.
    """

    name: str
    ranks: tuple[int, ...]
    address: str


@dataclass(frozen=True)
class MemoryJob:
    """A job that has checkpoints in the memory of this host.

    Attributes:
        folder: its folder on this host.
        directory: its save directory; '' if unknown.
        hosts: its hosts; empty if unknown.
        here: position of this host.
    """

    folder: HostFolder
    directory: str = ""
    hosts: tuple[HostContact, ...] = ()
    here: int = 0

    def storage(self, number: int) -> PeerStorage:
        """Return the storage of a generation."""
        others = [host.address for at, host in enumerate(self.hosts) if at != self.here]
        return PeerStorage(self.folder, number, others, timeout_s=_ANSWER_S)


def publish(hosts: JobHosts, directory: str) -> None:
    """Write the file of a job on this host. Never raises: it serves people only."""
    if hosts.leads:
        told = zip(hosts.names, hosts.ranks, hosts.addresses, strict=True)
        value = {
            "directory": directory,
            "here": hosts.here,
            "hosts": [asdict(HostContact(name, tuple(ranks), address)) for name, ranks, address in told],
        }
        with contextlib.suppress(OSError), replacing(hosts.folder.root / FILE) as file:
            file.write(json.dumps(value).encode())


def jobs(parent: Path) -> list[MemoryJob]:
    """Return the jobs of this user that have a folder in the memory of this host, in a directory such as ``/dev/shm``."""
    prefix = folder_prefix()
    found = [path.name.removeprefix(prefix) for path in own_folders(parent, prefix)]
    return [_job(parent, token) for token in found if re.fullmatch(TOKEN, token)]


def _job(parent: Path, token: str) -> MemoryJob:
    folder = HostFolder(parent, token)
    try:
        said = json.loads(read_text(folder.root / FILE, _LONGEST))
        hosts = tuple(HostContact(str(h["name"]), tuple(map(int, h["ranks"])), str(h["address"])) for h in said["hosts"])
        return MemoryJob(folder, str(said["directory"]), hosts, int(said["here"]))
    except (ValueError, KeyError, TypeError, RecursionError):  # of a job that is just beginning
        return MemoryJob(folder)


def named(name: str, parent: Path) -> PeerStorage | None:
    """Return the storage of the generation that a person names; None if the name means something else.

    Args:
        name: ``memory://TOKEN/gNUMBER`` as in the log, the path of such a folder, or one of both without the generation, which
            means the newest that can be loaded.
        parent: directory in memory, for the form without a path.

    Raises:
        ConfigError: this user has no such job on this host.
        NotACheckpointError: there is no such generation, or none that can be loaded.
    """
    url = re.fullmatch(rf"memory://({TOKEN})(?:/(g\d{{1,20}}))?/?", name)
    path = None if "://" in name else re.fullmatch(rf"{folder_name('')}({TOKEN})(?:/(g\d{{1,20}}))?", _tail(Path(name)))
    found = url or path
    if found is None:
        return None
    token, generation = found.groups()
    if path is not None:
        parent = Path(name).absolute().parents[1 if generation else 0]
    job = next((job for job in jobs(parent) if job.folder.root.name == folder_name(token)), None)
    if job is None:
        raise ConfigError(f"{name}: this user has no job with this token in {parent}; unickpt hosts lists them")
    if generation:
        return job.storage(number_of(generation) or 0)
    rows = [row for row in look(job) if row.places]
    if not rows:
        raise NotACheckpointError(f"{name}: no generation there can be loaded; unickpt hosts lists what is left of them")
    return job.storage(max(row.number for row in rows))


def _tail(path: Path) -> str:
    """Return the last part of a path, with the one before if it is a generation."""
    return f"{path.parent.name}/{path.name}" if number_of(path.name) is not None else path.name


@dataclass(frozen=True)
class GenerationRow:
    """A generation of a job.

    Attributes:
        number: generation.
        step, tag: of the checkpoint; None and '' without a readable commit record.
        places: number of hosts that hold each file, at least: 0 if it cannot be loaded, 1 if it has no copies.
        missing: a file that no host holds; ''.
        hosts: of each host: bytes held, data files of its own ranks, data files of other ranks; None if it does not answer.
    """

    number: int
    step: int | None
    tag: str
    places: int
    missing: str
    hosts: tuple[tuple[int, int, int] | None, ...] = field(default=())


def look(job: MemoryJob) -> list[GenerationRow]:
    """Return the generations of a job, newest first, as this host and the keepers of the others tell."""
    inventories: list[Inventory | None] = []
    for at, host in enumerate(job.hosts or (HostContact("", (), ""),)):
        inventories.append(job.folder.inventory() if at == job.here else _asked(host))
    known = [each for each in inventories if each is not None]
    every = sorted({number for each in known for number in each.files}, reverse=True)
    return [_row(job, number, inventories) for number in every]


def _asked(host: HostContact) -> Inventory | None:
    try:
        client = KeeperClient(host.address, _ANSWER_S)
    except (FormatError, ValueError):
        return None
    try:
        return client.inventory()
    except (StorageError, FormatError):
        return None
    finally:
        client.close()


def _row(job: MemoryJob, number: int, inventories: Sequence[Inventory | None]) -> GenerationRow:
    storage, known = job.storage(number), [each for each in inventories if each is not None]
    manifest: Manifest | None = None
    step, tag, places, gap = None, "", 0, "manifest.json"
    with contextlib.suppress(UnickptError):
        manifest = read_manifest(storage)
        step, gap = manifest.step, next(iter(missing(number, manifest, known)), "")
        places = min(_holders(number, record.path, record.size_bytes, known) for record in manifest.files)
        tag = parse_about(storage.read(ABOUT_FILE, 0, storage.size_bytes(ABOUT_FILE) or 0), where=storage.where(ABOUT_FILE))
    held = tuple(_held(job, at, number, each) for at, each in enumerate(inventories))
    return GenerationRow(number, step, tag, places if tag else 0, gap, held)


def _holders(number: int, name: str, size_bytes: int, inventories: Sequence[Inventory]) -> int:
    return sum(each.files.get(number, {}).get(name) == size_bytes for each in inventories)


def _held(job: MemoryJob, at: int, number: int, inventory: Inventory | None) -> tuple[int, int, int] | None:
    if inventory is None:
        return None
    files = inventory.files.get(number, {})
    data = {name for name in files if name.startswith("data/")}
    own = {RankFiles(rank, 0).data for rank in (job.hosts[at].ranks if job.hosts else ())}
    return sum(files.values()), len(data & own), len(data - own)


def as_json(job: MemoryJob, rows: Sequence[GenerationRow], now_ns: int) -> dict[str, object]:
    """Return a job and its generations (``look``) as JSON types, without the secrets. ``now_ns``: since the epoch."""
    hosts = [{"host": host.name, "ranks": list(host.ranks)} for host in job.hosts]
    return {
        "name": job.folder.url, "folder": str(job.folder.root), "directory": job.directory, "hosts": hosts,
        "generations": [
            {
                "generation": folder_of(row.number), "step": row.step, "tag": row.tag, "age_s": age_s(row, now_ns),
                "places": row.places, "missing": row.missing,
                "held": [None if h is None else {"bytes": h[0], "own": h[1], "copies": h[2]} for h in row.hosts],
            }
            for row in rows
        ],
    }  # fmt: skip


def age_s(row: GenerationRow, now_ns: int) -> float:
    """Return the seconds since the save of a generation began, on the clock of the host of rank 0."""
    return max(now_ns - row.number, 0) / 1e9
