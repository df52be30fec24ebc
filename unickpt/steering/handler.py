"""The handler of one agent: what torchrun asks it, and its steps from one round to the next."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from unickpt.base.left_workers import AGENT, LeftWorker, WorkerRecord, digest_of, end_all, left_behind
from unickpt.base.logs import logger, printable
from unickpt.base.round_folder import HOST, HOSTS, RINGS, ROUND, RUN_ID, STORE, note_stopping
from unickpt.checkpoint.fence import FENCE
from unickpt.diagnosis.host.process_exits import ExitStatus
from unickpt.steering.agent.end_signal import EndSignal
from unickpt.steering.agent.peer import Peer
from unickpt.steering.agent.waiting import WaitingNotice
from unickpt.steering.host.host_agent import HostAgent
from unickpt.steering.host.patience import Patience
from unickpt.steering.host.start_notes import StartNotes
from unickpt.steering.host.workers import EndedWorkers, kill_stopped_workers, kill_workers_of_ranks
from unickpt.steering.links.self_check import SelfCheck
from unickpt.steering.publishing.observers import Observers
from unickpt.steering.state.membership import (
    TOLD_TO_END,
    Arrived,
    Committed,
    Event,
    JobPhase,
    Leaving,
    Left,
    Membership,
    Opened,
    Ready,
    Round,
    WorkerFailed,
    WorkersEnded,
    exit_code,
    leaves_no_boundary,
    must_stop,
    rank_in_round,
)
from unickpt.steering.state.orders import is_to_end
from unickpt.steering.wire.codec import join_address, split_address
from unickpt.steering.wire.round_store import RoundStore, answer

BACKEND = "unickpt"
CONNECT_S, STORE_S = 10.0, 300.0


class SteeringHandler(RendezvousHandler):
    """Handler of one agent.

    Args:
        peer: this agent's part in the membership, started.
        agent: diagnosis agent of this host.
        self_check: measurements of this host.
        notice: says what this host waits for.
        run_id: ``--rdzv-id``.
        timeout_s: seconds after which ``next_rendezvous`` gives up if no round runs.
        record: record of the workers of this agent.
        contact: folder for this user's command line, removed at the end.
        observers: what is told of events; closed at the end.
    """

    def __init__(
        self, peer: Peer, agent: HostAgent, self_check: SelfCheck, notice: WaitingNotice, run_id: str, timeout_s: float,
        record: WorkerRecord, contact: Path | None = None, observers: Observers | None = None,
    ) -> None:  # fmt: skip
        self._peer, self._agent, self._run_id, self._timeout_s = peer, agent, run_id, timeout_s
        self._contact, self._observers, self._record = contact, observers, record
        self._self_check, self._notice = self_check, notice
        self._epoch = (0, 0)  # of the last round that this agent took part in
        self._stores: dict[tuple[int, int], TCPStore] = {}
        self._reserved: dict[tuple[int, int], socket.socket] = {}
        self._stopping = (0, 0)  # round whose end was seen
        self._workers: EndedWorkers | None = None  # of this round
        self._failure: tuple[WorkerFailed, ...] = ()  # of the workers of the last round
        self._commits = ((0, 0), 0)  # round, and its commits that the leader knows of
        self._patience: Patience | None = None  # with workers that save
        self._ends = ""  # signal that tells this agent to end
        self._signal = EndSignal(self._told_to_end)
        atexit.register(self._end_as_told)

    def get_backend(self) -> str:
        """See base class."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Worker 0 opens the store of the workers, at a new port in every round."""
        return False

    def get_run_id(self) -> str:
        """See base class."""
        return self._run_id

    def is_closed(self) -> bool:
        """See base class."""
        state = self._peer.read()
        return state is not None and bool(state.closed)

    def set_closed(self) -> None:
        """Close the job on all hosts."""
        self._leave(Left(*self._who, failed="the job was closed"))

    def num_nodes_waiting(self) -> int:
        """Return 1 if the workers must be restarted, else 0. Without steering a healthy run goes on, so no fault is raised."""
        self._end_if_asked(self._peer.read())  # torchrun's own handler of the signal raises here
        try:
            state = self._peer.read()
            if state is None or not must_stop(state, self._epoch):
                self._tell_commits()
                return 0
            if self._stopping != self._epoch:
                self._stopping = self._epoch
                why = state.closed or state.reason
                logger.info("unickpt: steering: stopping the workers of round %s: %s", _text(self._epoch), printable(why))
                if self._workers is not None:
                    self._workers.look()  # before torchrun stops the workers, which may then wait for a save
                orders = [order for order in state.orders if order.epoch == self._epoch]
                hopeless, folder = leaves_no_boundary(state, orders), os.environ.get(RINGS, "")
                if hopeless and folder:
                    note_stopping(Path(folder), hopeless)  # before torchrun sends SIGTERM
                self._patience = Patience.begin(Path(folder), state.limits.arrive_s) if folder and not hopeless else None
                self._agent.end(last_look=not orders)  # an order has its verdict, and what is killed for it needs none
                blamed = {rank for order in orders for rank in order.ranks}
                killed = [*kill_stopped_workers(), *kill_workers_of_ranks(blamed)]
                if killed:
                    logger.info("unickpt: steering: killed workers that are stopped or hang: %s", ", ".join(map(str, killed)))
            return 0 if self._patience is not None and self._patience.lasts() else 1
        except Exception as err:
            logger.warning("unickpt: steering: %s: %s", type(err).__name__, err)
            return 0

    def _tell_commits(self) -> None:
        """Tell the leader when the workers of this host have committed a checkpoint."""
        count = self._agent.commits()
        if count is not None and (self._epoch, count) != self._commits:
            self._commits = (self._epoch, count)
            self._peer.say(Committed(*self._who, self._epoch, count))

    def shutdown(self) -> bool:
        """Leave the job. torchrun calls this when the workers have ended, or with the exception that ends the agent."""
        error = sys.exc_info()[1]
        finished = error is None
        failed = "" if finished else f"{type(error).__name__}"
        if not finished and self._workers_told(error):
            self._ends = self._ends or signal.SIGTERM.name
        self._leave(Left(*self._who, finished, failed))
        if self._ends:
            atexit.register(self._end_by_signal)
        return True

    def _workers_told(self, error: BaseException | None = None) -> bool:
        """Return whether a signal such as SIGTERM, which did not come from this agent, has ended the workers. That is no error.

        Args:
            error: exception of torchrun that names the exit codes of the workers.
        """
        if self._workers is None or self._stopping == self._epoch:
            return False
        if isinstance(error, ChildFailedError) and all(ExitStatus.of(each.exitcode).asked for each in error.failures.values()):
            return True
        return self._workers.told_to_end()

    def _told_to_end(self, name: str) -> None:
        """torchrun gives the workers of this host time to end. They may save, for which all ranks are needed."""
        self._ends = name
        logger.info(
            "unickpt: steering: this agent is told to end (%s). The workers of all hosts are asked to end now, so that they "
            "can save together, and no round begins before this host has left",
            name,
        )
        self._peer.say(Leaving(*self._who, name))

    def _end_if_asked(self, state: Membership | None) -> None:
        """End as by SIGTERM from a scheduler, once, if a person has asked the job to end."""
        if state is not None and not self._ends and is_to_end(state):
            self._ends = signal.SIGTERM.name
            os.kill(os.getpid(), signal.SIGTERM)

    def _end_as_told(self) -> None:
        """Leave at the end of the process."""
        self._leave(Left(*self._who))
        self._end_by_signal()

    def _end_by_signal(self) -> None:
        """End by the signal that torchrun, or its workers, have received.

        Schedulers and scripts then see its exit code, 143 for SIGTERM, and not that of an error.
        """
        number = signal.Signals[self._ends] if self._ends else None
        if number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            sys.stdout.flush()
            sys.stderr.flush()
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _leave(self, event: Left) -> None:
        atexit.unregister(self._end_as_told)
        self._signal.close()
        self._end_watch()
        self._agent.close()
        if self._contact is not None:
            shutil.rmtree(self._contact, ignore_errors=True)
        self._record.end()
        self._peer.close(Left(*self._who, event.finished, event.failed))
        if self._observers is not None:
            self._observers.close()

    @property
    def _who(self) -> tuple[str, str]:
        """Name and incarnation of this agent, with which its events begin. The name may change once."""
        return self._peer.name, self._peer.incarnation

    # ------------------------------------------------------------ rendezvous

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the next round of this host. Spare and parked hosts wait here.

        Raises:
            RendezvousClosedError: the job has ended because too few hosts are left, or by an order.
            RendezvousTimeoutError: no round has begun in time.
            SystemExit: the program has finished while this host was out, or a spare; or its workers were told to end.
        """
        failed = self._workers.failure() if self._workers is not None and self._stopping != self._epoch else None
        told = self._workers_told()
        self._failure = ()
        if failed is not None:
            logger.warning("unickpt: steering: round %s has ended on this host: %s", _text(self._epoch), printable(failed.text))
            self._failure = (
                WorkerFailed(*self._who, self._epoch, failed.signature[:200], failed.text[:600], failed.remedy.value),
            )
        self._end_watch()
        self._agent.end(last_look=True)
        self._end_left_workers()
        began_s = time.monotonic()
        self._notice.begin()
        self._say()
        state = self._peer.read()
        while True:
            now_s = time.monotonic()
            self._end_if_asked(state)
            if state is not None:
                self._check_closed(state, told=told)
                self._self_check.follow(state, *self._who)
                info = self._part_in(state)
                if info is not None:
                    return info
                if state.phase is JobPhase.RUNNING:
                    began_s = now_s  # a spare waits as long as the others work
            if now_s - began_s > self._timeout_s:
                said = ". next: ".join(filter(None, self._notice.text(state)))
                raise RendezvousTimeoutError(f"unickpt: no round began within {self._timeout_s:.0f} s: {said}")
            self._notice.look(state)
            state = self._peer.wait(state, 0.5)

    def _end_left_workers(self) -> None:
        """End what an earlier agent of this job has left on this host: it would save beside the next round, and holds GPUs."""
        left = left_behind(self._record.job)
        if left:
            logger.warning(
                "unickpt: steering: ending workers that an agent of this job has left on this host at its end: %s. No round "
                "begins here before they have ended",
                _names(left),
            )
        stuck = end_all(left)
        if stuck:
            logger.error(
                "unickpt: steering: these workers do not end: %s. They may be in uninterruptible sleep and hold a GPU: "
                "look at them before you trust this host. Their saves are refused as soon as the next round has begun",
                _names(stuck),
            )

    def _say(self, *news: Event) -> None:
        if self._ends:
            return
        self._peer.say(*self._failure, Arrived(*self._who, self._epoch), *news)

    def _check_closed(self, state: Membership, *, told: bool) -> None:
        if not state.closed:
            return
        code = exit_code(state, self._epoch, told=told)
        if code == TOLD_TO_END:
            self._ends = self._ends or signal.SIGTERM.name
            logger.info("unickpt: steering: %s; the workers of this host were told to end", printable(state.closed))
            raise SystemExit(code)
        if code == 0:
            logger.info("unickpt: steering: %s; this host was not in the last round", printable(state.closed))
            raise SystemExit(code)
        raise RendezvousClosedError(f"unickpt: {state.closed}")

    def _part_in(self, state: Membership) -> RendezvousInfo | None:
        """Do this host's next step towards a round. Return the round when all members are connected."""
        rank, round_ = rank_in_round(state, *self._who), state.round
        if rank < 0 or round_ is None or round_.epoch == self._epoch:
            self._say()
            return None
        if state.phase is JobPhase.OPENING:
            self._connect(rank, round_)
            return None
        store = self._stores.get(round_.epoch)
        if store is None:
            self._say()  # the round has begun without this process: ask for the next one
            return None
        return self._begin(rank, round_, store, state)

    def _connect(self, rank: int, round_: Round) -> None:
        epoch = round_.epoch
        if epoch in self._stores or (rank > 0 and not round_.store):
            return
        try:
            if rank == 0:
                host, _ = split_address(self._peer.address)
                store = TCPStore(host, 0, None, True, timedelta(seconds=CONNECT_S), wait_for_workers=False)
                self._stores[epoch], self._reserved[epoch] = store, _reserve()
                master = join_address(host, self._reserved[epoch].getsockname()[1])
                hub = self._agent.hub(epoch)
                store.set(HOSTS, json.dumps([member for member, _ in round_.members]))
                self._say(Opened(*self._who, epoch, join_address(host, store.port), master, hub))
            else:
                host, port = split_address(round_.store)
                wait = timedelta(seconds=CONNECT_S)
                self._stores[epoch] = answer(
                    lambda: TCPStore(host, port, None, False, wait, wait_for_workers=False),
                    lambda: self._is_past(epoch),
                    2 * CONNECT_S,
                )
                self._say(Ready(*self._who, epoch))
        except (OSError, RuntimeError, ValueError) as err:
            logger.warning("unickpt: steering: no connection to the store of round %s: %s", _text(epoch), err)
            time.sleep(0.5)

    def _begin(self, rank: int, round_: Round, store: TCPStore, state: Membership) -> RendezvousInfo:
        self._epoch = round_.epoch
        self._peer.say()
        for old in [epoch for epoch in self._stores if epoch != round_.epoch]:
            self._stores.pop(old)
        for old in [epoch for epoch in self._reserved if epoch != round_.epoch]:
            self._reserved.pop(old).close()
        store.set_timeout(timedelta(seconds=STORE_S))
        host, port = split_address(round_.master)
        size = len(round_.members)
        os.environ[ROUND], os.environ[AGENT] = _text(round_.epoch), str(self._record.agent)
        os.environ[STORE], os.environ[HOST] = round_.store, self._peer.name
        os.environ[FENCE] = f"{digest_of(self._record.job)}/{state.instance}"
        self._agent.begin(round_.epoch, round_.hub, is_hub=rank == 0)
        self._watch(round_.epoch, store)
        names = ", ".join(f"{place} {name}" for place, (name, _) in enumerate(round_.members))
        logger.info("unickpt: steering: round %s: rank %d of %d (%s)", _text(round_.epoch), rank, size, printable(names))
        differs = state.limits.out_of_order([name for name, _ in round_.members])
        if differs:
            logger.warning(
                "unickpt: steering: round %s differs from --rdzv-conf order=: %s. Hosts that are not in the order fill gaps. "
                "If a host should be in its place, compare the names with those of `unickpt hosts`",
                _text(round_.epoch),
                printable(differs),
            )
        guarded = RoundStore(store, lambda: self._is_over(round_.epoch), self._count_workers, 2 * STORE_S)
        return RendezvousInfo(guarded, rank, size, RendezvousStoreInfo(host, port))  # type: ignore[arg-type]

    def _watch(self, epoch: tuple[int, int], store: TCPStore) -> None:
        """Watch the workers of a round that torchrun is about to start."""
        folder = os.environ.get(RINGS, "")

        def ended() -> frozenset[int]:
            state = self._peer.read()
            return state.ended if state is not None and state.round is not None and state.round.epoch == epoch else frozenset()

        def tell(ranks: tuple[int, ...]) -> None:
            self._peer.keep(WorkersEnded(*self._who, epoch, ranks))

        variables = [f"{name}={value}".encode() for name, value in self._variables(epoch)]
        notes = StartNotes(store, self._peer.name, self._run_id, _text(epoch), lambda: self._is_over(epoch))

        def begun(ranks: Mapping[int, int]) -> None:
            self._record.note(ranks)
            notes.begun(ranks)

        self._record.begin(variables)
        self._workers = EndedWorkers(variables, Path(folder) if folder else None, ended, tell, begun)

    def _variables(self, epoch: tuple[int, int]) -> tuple[tuple[str, str], ...]:
        """Return variables that the workers of a round have, and no other processes but those that they start."""
        return (RUN_ID, self._run_id), (ROUND, _text(epoch)), (AGENT, str(self._record.agent))

    def _end_watch(self) -> None:
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    def _count_workers(self, count: int) -> None:
        self._peer.workers = count

    def _is_over(self, epoch: tuple[int, int]) -> bool:
        state = self._peer.read()
        return state is not None and must_stop(state, epoch)

    def _is_past(self, epoch: tuple[int, int]) -> bool:
        """Whether a round that was opening is none any more."""
        state = self._peer.read()
        if state is None:
            return False
        return bool(state.closed) or state.round is None or state.round.epoch != epoch or state.phase is JobPhase.GATHERING


def _names(workers: list[LeftWorker]) -> str:
    return ", ".join(f"rank {each.rank} (process {each.process.pid}, of agent {each.agent.pid})" for each in workers)


def _text(epoch: tuple[int, int]) -> str:
    return f"{epoch[0]}.{epoch[1]}"


def _reserve() -> socket.socket:
    """Return a socket that holds a free port without listening. A server that sets SO_REUSEADDR can still bind it.

    The port of the workers' store is chosen seconds before worker 0 opens it. A held port is given to no other process.
    """
    holder = socket.socket()
    with contextlib.suppress(OSError):
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("", 0))
    return holder
