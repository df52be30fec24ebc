"""Find the generations that can be loaded, and open one."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from unickpt.base.errors import FormatError, StorageError, UnickptError
from unickpt.base.logs import logger
from unickpt.base.private_files import open_regular
from unickpt.checkpoint.checkpoint_folder import read_manifest
from unickpt.checkpoint.coordination.message_exchange import Message, MessageExchange
from unickpt.checkpoint.format.checksums import RunningDigest
from unickpt.checkpoint.format.manifest import MANIFEST_FILE, MAX_MANIFEST_BYTES, from_bytes
from unickpt.checkpoint.format.witnessed import suspicion_in_memory
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.memory.generations import ABOUT_FILE, Inventory, missing, numbers, passed_or_none
from unickpt.checkpoint.memory.host_folder import HostFolder, parse_about
from unickpt.checkpoint.memory.hosts import JobHosts
from unickpt.checkpoint.memory.peer_storage import PeerStorage
from unickpt.checkpoint.storage.posix import PosixStorage
from unickpt.checkpoint.witness_faults import read_faults

_ABOUT_BYTES, _PART_BYTES = 1 << 16, 8 << 20


@dataclass(frozen=True, slots=True)
class FoundGeneration:
    """A generation of which the hosts of this job hold every file.

    Attributes:
        number: the generation.
        step: training step.
        tag: name that the framework gave the checkpoint.
        passed_until: last step that the witness had passed at its save; -1 without a witness.
    """

    number: int
    step: int
    tag: str
    passed_until: int = -1


def find(hosts: JobHosts, exchange: MessageExchange, save_dir: str) -> tuple[list[FoundGeneration], list[str]]:
    """Return the generations that can be loaded, newest first, and why others cannot. Every rank calls this.

    Generations that may have traces of a fault that the witness has found are left out.
    """
    own = None
    if hosts.leads:
        _remove_damaged_records(hosts.folder)
        own = hosts.folder.inventory().to_json()

    def complete(messages: list[Message]) -> Message:
        try:
            inventories = [Inventory.from_json(messages[ranks[0]]["inventory"]) for ranks in hosts.ranks]
            found, problems = _complete(hosts, inventories)
            return {"found": [asdict(each) for each in _without_suspects(found, save_dir)], "problems": problems}
        except Exception as err:  # the other ranks wait
            return {"found": [], "problems": [f"{type(err).__name__}: {err}"]}

    told = exchange.combined("memory-inventory", {"inventory": own}, complete)
    return [FoundGeneration(**each) for each in told["found"]], told["problems"]


def _without_suspects(found: list[FoundGeneration], save_dir: str) -> list[FoundGeneration]:
    try:
        faults = read_faults(save_dir)
    except UnickptError:
        faults = ()  # the disk tells it, which is looked at next
    suspect = [each for each in found if suspicion_in_memory(each.step, faults) is not None]
    for each in suspect:
        logger.warning(
            "unickpt: %s in memory may have traces of a fault that the witness has found: it is not loaded", each.tag
        )
    return [each for each in found if each not in suspect]


def _remove_damaged_records(folder: HostFolder) -> None:
    """Remove the commit records on this host in which a bit has changed: the copy on another host is read in their place."""
    for number, files in folder.inventory().files.items():
        storage = PosixStorage(folder.generation(number))
        for name in (MANIFEST_FILE, ABOUT_FILE):
            if name in files:
                try:
                    data = storage.read(name, 0, min(files[name], MAX_MANIFEST_BYTES))
                    _ = from_bytes(data, where="") if name == MANIFEST_FILE else parse_about(data, where="")
                except FormatError:
                    with contextlib.suppress(OSError):
                        folder.path(number, name).unlink()
                    logger.warning("unickpt: %s is damaged in memory and was removed", storage.where(name))
                except StorageError:
                    continue


def _complete(hosts: JobHosts, inventories: Sequence[Inventory]) -> tuple[list[FoundGeneration], list[str]]:
    found, problems = [], []
    for number in numbers(inventories):
        storage = PeerStorage(hosts.folder, number, hosts.peers)
        try:
            manifest = read_manifest(storage)
            absent = missing(number, manifest, inventories)
            if absent:
                more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
                problems.append(f"no host of this job holds {absent[0]}{more} of step {manifest.step} in memory")
                continue
            about = storage.read(ABOUT_FILE, 0, min(storage.size_bytes(ABOUT_FILE) or 0, _ABOUT_BYTES))
            tag, until = parse_about(about, where=storage.where(ABOUT_FILE)), passed_or_none(manifest.witness)
            found.append(FoundGeneration(number, manifest.step, tag, until))
        except UnickptError as err:
            problems.append(str(err))
    return found, problems


def open_generation(hosts: JobHosts, number: int) -> tuple[Checkpoint, PeerStorage]:
    """Open a generation. Raises UnickptError, as ``Checkpoint.of``."""
    storage = PeerStorage(hosts.folder, number, hosts.peers)
    return Checkpoint.of(storage, read_manifest(storage)), storage


def remove_damaged(hosts: JobHosts, number: int) -> list[str]:
    """Compare the files that this host holds of a generation with the manifest, and remove those that differ.

    Returns:
        Names of the removed files. Their copies on other hosts are read in their place.

    Raises:
        UnickptError: the manifest cannot be read.
    """
    storage = PeerStorage(hosts.folder, number, hosts.peers)
    removed = []
    for record in read_manifest(storage).files:
        path = hosts.folder.path(number, record.path)
        with contextlib.suppress(FileNotFoundError):
            if _digest_of(path) != record.checksum:
                path.unlink()
                removed.append(record.path)
    return removed


def _digest_of(path: Path) -> str:
    whole = RunningDigest()
    with open_regular(path) as file:
        while part := file.read(_PART_BYTES):
            whole.update(part)
    return whole.value()


def sources_read(storage: PeerStorage) -> str:
    """Return where the bytes of a load came from, as ``12,345 bytes from this host, 678 from 10.0.0.2:4711``."""
    read = storage.counts.by_source()
    with contextlib.suppress(StopIteration):
        first = next(iter(read))
        return ", ".join(f"{size:,}{' bytes' if source == first else ''} from {source}" for source, size in read.items())
    return "no bytes"
