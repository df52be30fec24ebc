"""The hosts of the soak: each has a network, a shared memory and a temporary folder of its own. All share one small disk.

``Place`` finds what an earlier piece has left behind when its machine, or the command alone, was cut, and removes it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from evidence.sixty_four.soak.worker_files import TIME, Worked, read_steps
from evidence.steering.cluster import Cluster
from tests.jobs.steering.namespaces import Network
from unickpt.base.private_files import own_folders

NAMES, RANKS, FEWEST = ("n1", "n2", "n3", "n4"), 4, 2
ENDPOINT = "n2"
MARK, ERA = "UNICKPT_SOAK", "UNICKPT_SOAK_ERA"  # in the environment: the folder of the soak, and as in ``worker``
SHM_BYTES, DISK_BYTES = 96 << 20, 32 << 20
CONF = (
    "stopped_seconds=10,hang_seconds=15,still_seconds=5,loop_seconds=15,out_seconds=30,longest_out_seconds=30,"
    "slow=evict,slow_seconds=12,boundary_seconds=20"
)
EXPIRY_S = 8
CLOCKS = ("clock", "clock-kill")  # kinds of faults


def _mounted() -> set[str]:
    return {line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()}


@dataclass(frozen=True)
class Held:
    """What a piece holds at one time.

    Attributes:
        harness_mb, harness_threads, harness_descriptors: of this process.
        agents_mb, agents_threads, agents_descriptors: of all agents of torchrun and of diagnosis, the largest one.
        ranks_mb, ranks_threads, ranks_descriptors: of all ranks, the largest one.
        processes: of the job.
        shm_files: files in the shared memory of all hosts.
        shm_mb: their size.
        disk_files, disk_mb: of the checkpoints.
        temporary_files: in the temporary folders of all hosts.
        machine_shm_files: of this job in the shared memory of the machine, where there must be none.
    """

    harness_mb: float
    harness_threads: int
    harness_descriptors: int
    agents_mb: float
    agents_threads: int
    agents_descriptors: int
    ranks_mb: float
    ranks_threads: int
    ranks_descriptors: int
    processes: int
    shm_files: int
    shm_mb: float
    disk_files: int
    disk_mb: float
    temporary_files: int
    machine_shm_files: int


class Place:
    """The folder of a soak, with the mounts and processes that belong to it.

    Args:
        folder: an empty one, or that of earlier pieces.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.disk = self.folder / "disk"
        for each in ("jobs", "hosts", "disk"):
            (self.folder / each).mkdir(parents=True, exist_ok=True)

    def of(self, host: str, what: str) -> Path:
        """Return a folder of a host: ``shm`` or ``tmp``."""
        return self.folder / "hosts" / host / what

    def library(self) -> Path:
        """Return the library that gives the processes of a host their own wall clock."""
        made = self.folder / "set_clock.so"
        if not made.exists():
            source = Path(__file__).with_name("set_clock.c")
            subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", str(made), str(source), "-ldl"], check=True)
        return made

    def processes(self) -> list[psutil.Process]:
        """Return the processes that this soak, or an earlier piece of it, has started."""
        found = []
        wanted = f"{MARK}={self.folder}".encode()
        for each in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                if each.pid != os.getpid() and wanted in Path(f"/proc/{each.pid}/environ").read_bytes().split(b"\0"):
                    found.append(each)
        return found

    def clear(self) -> int:
        """End what earlier pieces have left: processes, networks, mounts. Return how many processes there were."""
        left = self.processes()
        for each in left:
            with contextlib.suppress(psutil.Error):
                each.kill()
        psutil.wait_procs(left, timeout=20)
        note = self.folder / "network.json"
        if note.exists():
            for command in json.loads(note.read_text()):
                subprocess.run(command, capture_output=True, check=False)
            note.unlink()
        for at in sorted(_mounted()):
            if Path(at).is_relative_to(self.folder):
                subprocess.run(["umount", "--lazy", at], check=False)
        return len(left)

    def mount(self) -> None:
        """Make the disk and the memory of the hosts anew."""
        self._mounted_at(self.disk, DISK_BYTES)
        for host in NAMES:
            self.of(host, "tmp").mkdir(parents=True, exist_ok=True)
            self._mounted_at(self.of(host, "shm"), SHM_BYTES)

    def _mounted_at(self, at: Path, size: int) -> None:
        at.mkdir(parents=True, exist_ok=True)
        if str(at) in _mounted():
            subprocess.run(["umount", "--lazy", str(at)], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=1777", "unickpt-soak", str(at)], check=True)

    def forget(self, host: str) -> None:
        """Empty the memory and the temporary folder of a host, as the end of its power does."""
        for what in ("shm", "tmp"):
            for each in list(self.of(host, what).iterdir()):
                shutil.rmtree(each) if each.is_dir() and not each.is_symlink() else each.unlink()

    def note(self, network: Network) -> None:
        """Note how the network is removed, for a piece that begins after this one was cut."""
        ends = [["ip", "netns", "del", network.namespace(name)] for name in NAMES]
        ends += [["ip", "link", "del", network._outside(name)] for name in NAMES]
        ends += [["ip", "link", "del", each] for each in (network._switch, f"{network._switch}b")]
        (self.folder / "network.json").write_text(json.dumps(ends))


class Soaked(Cluster):
    """A job of the soak.

    Args:
        place: its folder.
        network: its network.
        number: of the job.
        steps: of the job.
        step_s: seconds of a step.
        clocks: each host has a clock that can be set.
    """

    def __init__(
        self, place: Place, network: Network, number: int, steps: int, step_s: float, *, clocks: bool = False
    ) -> None:  # fmt: skip
        self.place, self.number, self.steps, self.clocks = place, number, steps, clocks
        folder = place.folder / "jobs" / str(number)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.checkpoints = place.disk / f"job{number}"
        worker = Path(__file__).with_name("worker.py")
        program = [str(worker), str(folder), str(self.checkpoints), str(steps), str(step_s)]
        super().__init__(folder, network, f"{FEWEST}:{len(NAMES)}", program, CONF, ENDPOINT, RANKS, EXPIRY_S)
        self.worked = Worked(folder)
        self.arguments = ["--max-restarts", "1000"]
        self.era = 0

    def prefix(self, name: str) -> list[str]:
        """See base class. ``exec`` keeps the process number."""
        shm = self.place.of(name, "shm")
        return [*super().prefix(name), "sh", "-c", f'mount --bind "{shm}" /dev/shm && exec "$@"', "sh"]

    def variables(self, name: str) -> dict[str, str]:
        """See base class."""
        more = {
            ERA: str(self.era),
            MARK: str(self.place.folder),
            "TMPDIR": str(self.place.of(name, "tmp")),
            "UNICKPT_TIMING": "1",
            TIME: str(time.time() - time.monotonic()),
        }
        if self.clocks:
            self.set_clock(name, 0)
            more |= {
                "LD_PRELOAD": str(self.place.library()),
                "CLOCK_FILE": str(self._clock(name)),
            }
        return super().variables(name) | more

    def set_clock(self, name: str, by_s: int) -> None:
        """Set the wall clock of a host, relative to that of the machine."""
        descriptor = os.open(self._clock(name), os.O_WRONLY | os.O_CREAT)
        os.pwrite(descriptor, by_s.to_bytes(8, sys.byteorder, signed=True), 0)
        os.close(descriptor)

    def _clock(self, name: str) -> Path:
        return self.place.folder / "hosts" / name / "clock"

    def rings(self) -> list[Path]:
        """See base class."""
        start = f"unickpt-{os.geteuid()}-{self.identifier}-"
        return [each for name in NAMES for each in own_folders(self.place.of(name, "shm"), start)]

    def events(self) -> list[dict[str, Any]]:
        """See base class."""
        return self.worked.events()

    def lose(self, name: str) -> None:
        """See base class."""
        self.network.down(name)
        self.end(name)
        self.place.forget(name)

    def end(self, name: str) -> None:
        """Kill all processes of a host."""
        agent = self.running.pop(name, None)
        mine = [each for each in self.place.processes() if _host(each) == name]
        for each in mine:
            with contextlib.suppress(psutil.Error):
                each.kill()
        psutil.wait_procs(mine, timeout=20)
        if agent is not None:
            agent.wait()

    def over(self) -> bool:
        """Whether all agents have ended."""
        return all(agent.poll() is not None for agent in self.running.values())

    def close(self) -> None:
        """End the job."""
        for name in NAMES:
            self.end(name)
        for folder in self.rings():
            shutil.rmtree(folder, ignore_errors=True)

    def pids(self, host: str, words: str) -> list[int]:
        """Return the processes of a host whose command has these words."""
        found = []
        for each in self.place.processes():
            with contextlib.suppress(psutil.Error):
                if _host(each) == host and words in " ".join(each.cmdline()):
                    found.append(each.pid)
        return found

    # ------------------------------------------------------------ rounds

    def round_now(self) -> tuple[str, set[str], float] | None:
        """Return the newest round that has done a step, its hosts, and when it did the last step."""
        newest = read_steps(self.folder).newest()
        if newest is None:
            return None
        hosts = {each["host"] for each in self.events() if each["what"] == "started" and each["round"] == newest[0]}
        return newest[0], hosts, newest[1]

    def ranks(self) -> list[tuple[int, str, int]]:
        """Return rank, host and process of the ranks of the newest round that has done a step."""
        now = self.round_now()
        found = [each for each in self.events() if each["what"] == "started" and now is not None and each["round"] == now[0]]
        return sorted((each["rank"], each["host"], each["pid"]) for each in found)

    def held(self) -> Held:
        """Return what the piece holds now."""
        agents, ranks, processes = list[_Process](), list[_Process](), 0
        for each in self.place.processes():
            with contextlib.suppress(psutil.Error):
                said, processes = " ".join(each.cmdline()), processes + 1
                kept = ranks if "soak/worker.py" in said and self.launcher not in said else agents
                kept.append((each.memory_info().rss / 1e6, each.num_threads(), each.num_fds()))
        own = psutil.Process()
        shm = [each for name in NAMES for each in _files(self.place.of(name, "shm"))]
        disk = list(_files(self.place.disk))

        return Held(
            own.memory_info().rss / 1e6, own.num_threads(), own.num_fds(), *_most(agents), *_most(ranks), processes,
            len(shm), sum(shm) / 1e6, len(disk), sum(disk) / 1e6,
            sum(1 for name in NAMES for _ in _files(self.place.of(name, "tmp"))),
            len(own_folders(Path("/dev/shm"), f"unickpt-{os.geteuid()}-{self.identifier}")),
        )  # fmt: skip


_Process = tuple[float, int, int]  # megabytes, threads, descriptors


def _most(kept: list[_Process]) -> _Process:
    memory, threads, descriptors = zip(*kept, strict=True) if kept else ((0.0,), (0,), (0,))
    return max(memory), max(threads), max(descriptors)


def _host(process: psutil.Process) -> str:
    """Return the host of a process."""
    with contextlib.suppress(OSError):
        for each in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
            if each.startswith(b"STEERED_HOST="):
                return each.partition(b"=")[2].decode()
    return ""


def _files(folder: Path) -> Iterator[int]:
    """Yield the size of each file in a folder."""
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                yield os.lstat(os.path.join(place, name)).st_size


def waited(what: Callable[[], Any], limit_s: float, every_s: float = 0.25) -> Any:
    """Wait until something is true. Return it, or its last value at the time limit."""
    deadline = time.monotonic() + limit_s
    while True:
        value = what()
        if value or time.monotonic() > deadline:
            return value
        time.sleep(every_s)


def growth(before: Held, after: Held) -> dict[str, tuple[float, float]]:
    """Return first and last value of all that is held."""
    one, other = asdict(before), asdict(after)
    return {name: (round(one[name], 1), round(other[name], 1)) for name in one}
