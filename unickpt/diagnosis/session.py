"""Timing of one training process: the ring, the hooks, and the agent of the host.

A failure to begin is a warning; training continues without timing.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from unickpt.base.first_failure import on_last_exception
from unickpt.base.io_times import IoTime
from unickpt.base.logs import logger
from unickpt.base.memory_status import MemoryStatus, write_status
from unickpt.base.options.job import TimingOptions
from unickpt.base.private_files import SHARED_MEMORY, file_name, make_named_folder
from unickpt.base.prometheus import Scrape
from unickpt.base.role import role
from unickpt.base.round_folder import RUN_ID, folder_of_round, note_failure
from unickpt.diagnosis.agent import launch
from unickpt.diagnosis.host import stack_dumps
from unickpt.diagnosis.host.early_stacks import EARLY
from unickpt.diagnosis.layer_costs.measured import SUFFIX as LAYERS
from unickpt.diagnosis.recording.device_events import CudaEvents, EventSource
from unickpt.diagnosis.recording.fast_path import main_stack_first
from unickpt.diagnosis.recording.launched import arrives_first, this_host, write_launch
from unickpt.diagnosis.recording.layer_times import LayerTimes, TimedLayer
from unickpt.diagnosis.recording.phases import PhaseHooks, outside
from unickpt.diagnosis.recording.phases import watch_evaluation as watch_model
from unickpt.diagnosis.recording.process_group_hooks import ProcessGroupHooks
from unickpt.diagnosis.recording.recorder import CallRecorder
from unickpt.diagnosis.recording.records import Phase
from unickpt.diagnosis.recording.ring import SUFFIX, Identity, RingWriter
from unickpt.diagnosis.recording.ring_folder import SessionNote, remove_old, shared_folder, start_of_workers, write_note
from unickpt.diagnosis.recording.ring_room import RoomRequest, TimingOffError, agreed_records

_KEPT_S = 7 * 24 * 3600.0
_UNNAMED = {"undefined": "", "default_pg": "default"}  # torch's names of unnamed groups
Labels = Callable[[], Mapping[str, Sequence[Any]]]  # name of a kind of group in the framework -> its process groups


class Session:
    """Timing of this process.

    Args:
        options: options of the user.
        labels: returns the framework's process groups by kind.
        events: events that time calls on a device; None: those of CUDA if ``options.device`` asks for them.
        number: number of this session in its process.

    Attributes:
        folder: folder of the job's rings on this host.
        phases: recorder of steps and phases, for the adapter.
        layers: times of layers, for the adapter; None if they are not measured.
        watched: hooks that see evaluations, by model.

    Raises:
        CoordinationError: the ranks cannot agree on a folder.
        OSError: the ring cannot be created.
    """

    def __init__(self, options: TimingOptions, labels: Labels, events: EventSource | None = None, *, number: int = 0) -> None:
        self._labels = labels
        events = events if events is not None or not options.device else _device_events()
        rank, world = dist.get_rank(), dist.get_world_size()
        job = job_name()
        began_ns, (first_rank, ranks) = time.time_ns(), this_host()
        # the first rank to arrive, which need not be the first of the host: that one may hang before
        first = arrives_first(_store(), first_rank, f"{start_of_workers()}.{number}")
        if first:
            remove_old(SHARED_MEMORY, older_than_s=_KEPT_S)
        named = Path(options.folder).absolute() if options.folder else None  # absolute: the agent has another working directory
        given = folder_of_round()  # its agent has been there before this process
        self.folder = _folder(given, named, job)
        if first and ranks:
            make_named_folder(self.folder)
            write_launch(self.folder, first_rank, ranks, began_ns)
        here = Identity.here(rank, world, job)
        asks = RoomRequest(self.folder, options.records, max(ranks, 1), f"{start_of_workers()}.{number}/{first_rank}")
        ring = RingWriter(self.folder / f"{rank:05d}{SUFFIX}", here, capacity=agreed_records(asks, _store(), logger.warning))
        about = {"rank": rank, "world": world, "host": here.host}
        every, path = options.layers_every, self.folder / f"{rank:05d}{LAYERS}"
        self.layers = LayerTimes(path, every, about) if every else None
        self._recorder = CallRecorder(ring, self._describe, events)
        self.phases = PhaseHooks(self._recorder)
        self.watched: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
        self.hooks = ProcessGroupHooks(self._recorder, self.watch_evaluation)
        self.hooks.install()
        self.phases.install()
        self._stacks = stack_dumps.listen(stack_dumps.path_of(self.folder, rank))
        EARLY.records = True
        if self._stacks is not None:
            EARLY.end()
        self._fatal = self._stacks is not None and stack_dumps.listen_to_end(self._stacks, main_stack_first)
        self._remove_hook = on_last_exception(partial(note_failure, self.folder, rank), first=self._raised)
        self._agent = self._start_agent(options, first_rank if first_rank >= 0 else rank) if first and given is None else None
        if given is not None and first:
            write_note(given, SessionNote(str(self.folder), options.watch, _scrape(options, options.job)))

    def _start_agent(self, options: TimingOptions, first_rank: int) -> subprocess.Popen[bytes] | None:
        if not options.watch:
            return None
        return launch.start(self.folder, first_rank, _store(), _scrape(options, options.job or run_name()))

    def _describe(self, group: Any) -> dict[str, Any]:
        named = [label for label, groups in self._labels().items() if any(group is known for known in groups)]
        return {
            "ranks": dist.get_process_group_ranks(group),
            "label": named[0] if named else _UNNAMED.get(group.group_desc, group.group_desc),
            "backend": group.name(),
        }

    def watch_evaluation(self, model: Any) -> None:
        """Record when a model runs in evaluation mode or without gradients. May be called again for a model. Never raises."""
        if model in self.watched:
            return
        try:
            self.watched[model] = watch_model(model, self.phases.evaluates, self.phases.trains)
        except Exception as err:
            logger.warning("unickpt: evaluations are not seen, training is not affected (%s: %s)", type(err).__name__, err)

    def checkpoint_io(self, times: Iterable[IoTime]) -> None:
        """Record phases of saves and loads."""
        for each in times:
            self._recorder.checkpoint_io(each)

    def close(self) -> None:
        """Stop. The ring remains."""
        self.remove_hooks()
        raised = self._stacks is not None and stack_dumps.note_exception(self._stacks, getattr(sys, "last_traceback", None))
        self._recorder.close(raised=raised)
        if self._stacks is not None:
            self.ignore_signals()
            self._stacks.close()

    def _raised(self, trace: TracebackType | None) -> None:
        """Write where the exception was raised that ends this process. From then on nobody finds it in its hooks."""
        if self._stacks is not None:
            stack_dumps.note_exception(self._stacks, trace)  # at once: another rank's end may end this process by a signal
            self.ignore_signals()

    def ignore_signals(self) -> None:
        """Write no stacks any more. A fork of this process must not write the stacks of this rank."""
        if self._stacks is not None:
            stack_dumps.ignore(fatal=self._fatal)

    def remove_hooks(self) -> None:
        """Remove all hooks from the interpreter, from torch and from the layers."""
        self._remove_hook()
        if self.layers is not None:
            self.layers.stop()
        for handles in self.watched.values():
            for handle in handles:
                handle.remove()
        self.phases.uninstall()
        self.hooks.uninstall()


class ProcessTiming:
    """Owner of this process's timing: at most one session at a time. All methods may be called without a session."""

    def __init__(self) -> None:
        self._session: Session | None = None
        self._of_parent: Session | None = None
        self._begun = 0
        self._steps = 0  # that the program has done, as far as this process has counted them, or was told

    def start(self, options: TimingOptions, labels: Labels, events: EventSource | None = None) -> Session | None:
        """Begin to time unless timing is off or has begun. Never raises. Arguments as of ``Session``.

        Returns:
            The session; None if timing is off or could not begin. Training continues in any case.
        """
        if not options.enabled or self._session is not None:
            return self._session
        self._begun += 1
        try:
            self._session = Session(options, labels, events, number=self._begun)
        except TimingOffError as err:  # another rank of this host has said it
            logger.info("unickpt: collectives are not timed: %s", err)
            return None
        except Exception as err:
            logger.warning("unickpt: collectives are not timed, training is not affected (%s: %s)", type(err).__name__, err)
            return None
        atexit.register(self.stop)
        os.register_at_fork(after_in_child=self._forget)
        if dist.get_rank() == 0:
            logger.info("unickpt: collectives are timed; rings in %s", self._session.folder)
        return self._session

    def stop(self) -> None:
        """End timing in order."""
        session, self._session = self._session, None
        if session is not None:
            atexit.unregister(self.stop)
            session.close()

    def stepped(self, number: int) -> None:
        """Record the end of training step ``number``."""
        if self._session is not None:
            self._session.phases.step(number)
            if self._session.layers is not None:
                self._session.layers.stepped()

    def stepped_on(self) -> None:
        """Record the end of the next training step, in a program that does not number its steps."""
        self._steps += 1
        self.stepped(self._steps)

    def stands_at(self, step: int) -> None:
        """Take the number of steps that the program has done from a checkpoint: the next one has the next number.

        Otherwise a job that starts again would count from 1, and steering would see no progress.
        """
        self._steps = step

    def stands_at_least(self, step: int) -> None:
        """Take the number of steps from elsewhere, unless a checkpoint has told a larger one."""
        self._steps = max(self._steps, step)

    def folder(self) -> Path | None:
        """Return the folder of the rings on this host; None without a session."""
        return None if self._session is None else self._session.folder

    def time_layers(self, model: Any, find: Callable[[], Sequence[TimedLayer]]) -> None:
        """Measure the layers that ``find`` returns of a model, once, if the options ask for it. Never raises."""
        layers = None if self._session is None else self._session.layers
        if layers is None:
            return
        try:
            layers.add(model, find)
        except Exception as err:
            logger.warning("unickpt: layers are not timed, training is not affected (%s: %s)", type(err).__name__, err)

    def checkpoint_io(self, times: Iterable[IoTime]) -> None:
        """Record phases of a save or load. Any thread may call this. Never raises."""
        with contextlib.suppress(Exception):
            if self._session is not None:
                self._session.checkpoint_io(times)

    def memory_status(self, status: MemoryStatus) -> None:
        """Write the state of the memory tier for the agent. Any thread may call this. Never raises."""
        with contextlib.suppress(Exception):
            if self._session is not None:
                write_status(self._session.folder, status)

    @contextlib.contextmanager
    def in_phase(self, phase: Phase) -> Iterator[None]:
        """Record that training is in ``phase`` inside the ``with`` block."""
        phases = None if self._session is None else self._session.phases
        if phases is None:
            yield
            return
        before = outside(phases.phase(phase), phase)
        try:
            yield
        finally:
            phases.phase(Phase(before))

    def reduces(self) -> None:
        """Record the calls of a ``DistributedDataParallel`` whose ``__init__`` has begun. Later ones are seen by themselves."""
        if self._session is not None:
            self._session.hooks.reduces()

    def evaluates(self) -> None:
        """Record that this rank evaluates until it trains again."""
        if self._session is not None:
            self._session.phases.evaluates()

    def watch_evaluation(self, model: Any) -> None:
        """Record when a model runs in evaluation mode or without gradients. May be called again for a model. Never raises."""
        if self._session is not None:
            self._session.watch_evaluation(model)

    def _forget(self) -> None:
        """Remove all hooks in a forked child: the ring belongs to the parent."""
        # kept: its CUDA events would be destroyed without a context
        session, self._session = self._session, None
        self._of_parent = session
        if session is not None:
            session.ignore_signals()
            session.remove_hooks()


_process = ProcessTiming()  # the hooks of torch and of the frameworks exist once per process, and so does their owner
start, stop, stepped, in_phase, folder = _process.start, _process.stop, _process.stepped, _process.in_phase, _process.folder
checkpoint_io, memory_status, time_layers = _process.checkpoint_io, _process.memory_status, _process.time_layers
watch_evaluation, evaluates, reduces = _process.watch_evaluation, _process.evaluates, _process.reduces
stepped_on, stands_at, stands_at_least = _process.stepped_on, _process.stands_at, _process.stands_at_least


def _folder(given: Path | None, named: Path | None, job: str) -> Path:
    """Return the folder of the rings.

    Args:
        given: folder of the round, from the agent of torchrun.
        named: folder that the user has named. Each round has a folder of its own in it.
        job: name of the job.
    """
    if given is None:
        return named or shared_folder(SHARED_MEMORY, job, _store())
    return named / given.name if named is not None else given


def _device_events() -> EventSource | None:
    """Return the events of CUDA; None, with a warning, if torch sees no CUDA device."""
    if torch.cuda.is_available():
        return CudaEvents()
    logger.warning("unickpt: the option timing.device needs a CUDA device; calls are timed on the host only")
    return None


def _store() -> Any:
    """Return the job's key-value store."""
    store: Any = dist.distributed_c10d._get_default_store()
    return store


def _scrape(options: TimingOptions, job: str) -> Scrape:
    targets = str(Path(options.metrics_targets).absolute()) if options.metrics_targets else ""
    return Scrape(options.metrics_port, options.metrics_address, targets, job, role())


def run_name() -> str:
    """Return the ``--rdzv-id`` that torchrun's own backends name the run by; '' if the job has none."""
    name = os.environ.get(RUN_ID, "")
    return "" if name == "none" else name


def job_name() -> str:
    """Return a name that all ranks of a job share: their role, the launcher's run, the master's address and port."""
    parts = [role(), os.environ.get(RUN_ID, ""), os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")]
    text = "-".join(part for part in parts if part and part != "none")
    return file_name(text) or "job"
