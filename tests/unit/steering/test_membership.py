"""Membership: every short sequence of events, and long random ones with lost and repeated messages and dying hosts."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field, replace

import pytest

from unickpt.steering.membership import (
    Admit,
    Arrived,
    Close,
    Event,
    Heard,
    Joined,
    Left,
    Limits,
    Lost,
    Membership,
    Opened,
    Park,
    Paused,
    Phase,
    Ready,
    Restart,
    Standing,
    Tick,
    TookOver,
    holds_name,
    may_lead,
    must_stop,
    natural,
    quorum,
    rank_in_round,
    standing,
    successors,
    transition,
)

AT_ONCE = {"join_s": 0.0, "settle_s": 0.0, "arrive_s": 20.0, "expiry_s": 10.0}


def checked(before: Membership, event: Event, now_s: float) -> Membership:
    """Apply an event and check what must hold after every event."""
    after = transition(before, event, now_s)
    assert (after.term, after.version) >= (before.term, before.version)
    assert transition(after, Tick(), now_s) is after, "a state is settled"
    if not isinstance(event, Paused | Heard):
        assert replace(transition(after, event, now_s), version=after.version) == after, "a repeated event changes nothing"
    assert set(after.heard) == set(after.hosts)
    round_ = after.round
    if round_ is None:
        assert after.phase is Phase.GATHERING
        return after
    names = [name for name, _ in round_.members]
    assert len(set(names)) == len(names), "no host twice"
    assert after.limits.size(len(names)) == len(names), "the size is allowed"
    assert [rank_in_round(after, *member) for member in round_.members] == (
        [-1] * len(names) if after.phase is Phase.GATHERING else list(range(len(names)))
    )
    assert (after.phase is Phase.RUNNING) <= (round_.ready == set(names) and bool(round_.store))
    assert before.round is None or before.round.epoch <= round_.epoch
    if before.round is None or before.round.epoch != round_.epoch:
        assert not before.closed, "a closed job has no new round"
        assert not set(names) & set(after.parked)
        assert after.phase is Phase.OPENING
        assert all(holds_name(after, *member) for member in round_.members)
        old = [name for name in sorted(before.seats, key=before.seats.__getitem__) if name in names]
        assert [name for name in names if name in old] == old, "a host keeps its place"
    return after


def run(state: Membership, *events: Event, now_s: float = 0.0) -> Membership:
    for event in events:
        state = checked(state, event, now_s)
    return state


def arrive(state: Membership, *names: str, now_s: float = 0.0) -> Membership:
    after = state.round.epoch if state.round else (0, 0)
    for name in names:
        host = state.hosts.get(name)
        state = run(state, Joined(name, host.incarnation if host else "1", f"{name}:1"), now_s=now_s)
        state = run(state, Arrived(name, state.hosts[name].incarnation, after), now_s=now_s)
    return state


def connect(state: Membership, now_s: float = 0.0) -> Membership:
    """Let all members of an opened round connect."""
    assert state.phase is Phase.OPENING
    assert state.round is not None
    epoch, members = state.round.epoch, state.round.members
    state = run(state, Opened(*members[0], epoch, "store:1", "master:2"), now_s=now_s)
    state = run(state, *(Ready(name, incarnation, epoch) for name, incarnation in members[1:]), now_s=now_s)
    assert state.phase is Phase.RUNNING
    return state


def started(count: int, low: int, high: int, **limits: object) -> Membership:
    """Return a job whose first round runs on hosts h1, h2, ..."""
    state = Membership(Limits(low, high, **{**AT_ONCE, "join_s": 30.0}), "h1", gathering_s=-30.0)  # type: ignore[arg-type]
    state = connect(arrive(state, *(f"h{i}" for i in range(1, count + 1))))
    return replace(state, limits=Limits(low, high, **{**AT_ONCE, **limits}))  # type: ignore[arg-type]


def members(state: Membership) -> list[str]:
    assert state.round is not None
    return [name for name, _ in state.round.members]


def test_natural_order_of_names() -> None:
    assert sorted(["n10", "n2", "a", "n2b", "2", "10"], key=natural) == ["2", "10", "a", "n2", "n2b", "n10"]


def test_the_first_round_waits_for_all_hosts_or_for_the_time_to_join() -> None:
    state = Membership(Limits(2, 3, join_s=30), "h1")
    state = arrive(state, "h2", "h1", now_s=1)
    for now_s in range(2, 31):
        state = run(state, Heard("h1", "1"), Heard("h2", "1"), now_s=now_s)
        assert state.phase is Phase.GATHERING
    assert members(run(state, Tick(), now_s=31)) == ["h1", "h2"]
    assert members(arrive(state, "h3", now_s=30)) == ["h1", "h2", "h3"]


def test_a_single_host_starts_at_once() -> None:
    state = arrive(Membership(Limits(1, 1), "h1"), "h1")
    assert members(state) == ["h1"]
    assert connect(state).phase is Phase.RUNNING


def test_a_crashed_worker_starts_a_new_round_with_the_same_ranks() -> None:
    state = started(3, 2, 3)
    epoch = state.round.epoch if state.round else (0, 0)
    state = arrive(state, "h2")
    assert must_stop(state, epoch)
    assert state.reason == "the workers of h2 have ended"
    assert [standing(state, name) for name in ("h1", "h2", "h3")] == [Standing.STOPPING, Standing.ARRIVED, Standing.STOPPING]
    state = run(state, Arrived("h3", "1", epoch), Arrived("h1", "1", epoch))
    assert members(state) == ["h1", "h2", "h3"]
    assert connect(state).round != started(3, 2, 3).round


def test_a_lost_host_leaves_a_smaller_round_and_returns_to_its_place() -> None:
    state = started(4, 2, 4)
    state = run(state, Lost("h2", "1"))
    assert state.reason == "h2 is gone"
    state = connect(arrive(state, "h1", "h3", "h4"))
    assert members(state) == ["h1", "h3", "h4"]
    state = run(state, Joined("h2", "2", "h2:9"), Arrived("h2", "2"))
    assert state.reason == "h2 can be used"
    state = connect(arrive(state, "h1", "h3", "h4"))
    assert members(state) == ["h1", "h2", "h3", "h4"]


def test_a_spare_takes_the_place_of_a_lost_host_and_nobody_else_moves() -> None:
    state = started(3, 3, 3)
    state = arrive(state, "spare")
    assert standing(state, "spare") is Standing.SPARE
    assert state.phase is Phase.RUNNING
    state = run(state, Lost("h2", "1"))
    state = connect(arrive(state, "h3", "h1"))
    assert members(state) == ["h1", "spare", "h3"]


def test_a_round_takes_an_allowed_size_and_the_rest_wait() -> None:
    state = started(4, 2, 4, sizes=frozenset({2, 4}))
    state = connect(arrive(run(state, Lost("h1", "1")), "h2", "h3", "h4"))
    assert members(state) == ["h2", "h3"]
    assert standing(state, "h4") is Standing.SPARE


def test_a_silent_host_is_out_after_the_expiry() -> None:
    state = started(3, 1, 3)
    state = run(state, Heard("h1", "1"), Heard("h2", "1"), now_s=8)
    assert state.phase is Phase.RUNNING
    state = run(state, Tick(), now_s=11)
    assert state.reason == "h3 is gone"
    assert standing(state, "h3") is Standing.GONE


def test_silence_while_the_leader_did_not_run_proves_nothing() -> None:
    state = run(started(3, 1, 3), Paused(), now_s=1000)
    assert state.phase is Phase.RUNNING


def test_of_two_separated_groups_at_most_one_goes_on() -> None:
    for count in (2, 3, 4, 5):
        state = started(count, 1, count)
        names = members(state)
        for chosen in range(1, 2**count - 1):
            side = {name for bit, name in enumerate(names) if chosen >> bit & 1}
            parts = []
            for part in (side, set(names) - side):
                seen = run(state, *(Heard(name, "1") for name in sorted(part)), now_s=9)
                parts.append(quorum(run(seen, Tick(), now_s=15)))
                assert may_lead(state, frozenset(part), frozenset()) == parts[-1]
            assert sum(parts) == 1, side


def test_a_minority_whose_workers_have_ended_does_not_go_on_alone() -> None:
    for alone, goes_on in (("h3", False), ("h1", False), ("h1 h2", True), ("h2 h3", True)):
        state = arrive(started(3, 1, 3), *alone.split(), now_s=9)
        state = run(state, *(Heard(name, "1") for name in alone.split()), now_s=15)
        assert (state.phase is Phase.OPENING) is goes_on, alone
        assert members(state) == (alone.split() if goes_on else ["h1", "h2", "h3"])


def test_only_rank_0_of_this_round_opens_its_stores_and_once() -> None:
    state = arrive(started(2, 1, 2), "h1", "h2")
    assert run(state, Opened("h1", "1", (1, 1), "old:1", "old:2")).round == state.round
    assert run(state, Opened("h2", "1", (1, 2), "other:1", "other:2")).round == state.round
    state = run(
        state, Opened("h1", "1", (1, 2), "s:1", "m:1"), Opened("h1", "1", (1, 2), "t:1", "t:2"), Ready("h2", "1", (1, 1))
    )
    assert state.round is not None
    assert (state.round.store, state.round.master, state.phase) == ("s:1", "m:1", Phase.OPENING)


def test_without_a_quorum_a_running_round_is_left_alone() -> None:
    state = run(started(2, 1, 2), Heard("h2", "1"), now_s=9)
    state = run(state, Tick(), now_s=15)
    assert list(state.hosts) == ["h2"]
    assert state.phase is Phase.RUNNING
    assert members(connect(arrive(run(state, Lost("h1", "1"), now_s=15), "h2", now_s=15), 15)) == ["h2"]
    alone = run(replace(state, limits=replace(state.limits, lone=True)), Tick(), now_s=15)
    assert alone.reason == "h1 is gone"


def test_a_host_that_does_not_stop_its_workers_does_not_hold_up_the_others() -> None:
    state = arrive(run(started(3, 1, 3), Lost("h1", "1")), "h2")
    assert state.phase is Phase.GATHERING
    state = run(state, Heard("h2", "1"), Heard("h3", "1"), now_s=9)
    state = run(state, Heard("h2", "1"), Heard("h3", "1"), now_s=18)
    assert members(run(state, Tick(), now_s=21)) == ["h2"]


def test_a_finished_program_is_not_disturbed_and_starts_no_new_round() -> None:
    state = started(2, 1, 2)
    epoch = state.round.epoch if state.round else (0, 0)
    state = run(state, Left("h1", "1", finished=True))
    assert (state.finished, must_stop(state, epoch)) == (True, False)
    state = run(state, Left("h2", "1", finished=True), Joined("h3", "1", "h3:1"), Arrived("h3", "1"))
    assert state.closed == "the program has finished on h1"


def test_a_host_that_gives_up_ends_the_job_only_if_too_few_are_left() -> None:
    state = run(started(3, 2, 3), Left("h3", "1", failed="worker 2 exited with 1"))
    assert not state.closed
    state = connect(arrive(state, "h1", "h2"))
    state = run(state, Left("h1", "1", failed="worker 0 exited with 1"))
    assert state.closed == "h1 gave up (worker 0 exited with 1); 1 hosts are left, and 2 are needed"
    assert must_stop(state, (1, 2))


def test_a_preempted_host_does_not_close_the_job() -> None:
    state = run(started(2, 2, 2), Left("h2", "1"))
    assert not state.closed
    state = arrive(state, "h1")
    state = run(state, Joined("h2", "2", "h2:2"), Arrived("h2", "2"))
    assert members(state) == ["h1", "h2"]


def test_a_closed_job_closes_for_everybody() -> None:
    state = run(started(2, 1, 2), Close("asked"))
    assert must_stop(state, (1, 1))
    assert run(state, Close("again")).closed == "asked"


def test_a_parked_host_waits_until_it_is_admitted_also_after_its_restart() -> None:
    state = run(started(3, 1, 3), Park("h1", "slow"))
    state = connect(arrive(state, "h1", "h2", "h3"))
    assert members(state) == ["h2", "h3"]
    state = run(state, Lost("h1", "1"), Joined("h1", "2", "h1:2"), Arrived("h1", "2"))
    assert standing(state, "h1") is Standing.PARKED
    state = connect(arrive(run(state, Admit("h1")), "h1", "h2", "h3"))
    assert members(state) == ["h1", "h2", "h3"]


def test_parking_for_a_time_ends_by_itself() -> None:
    state = connect(arrive(run(started(2, 1, 2), Park("h2", "hung", 60)), "h1", "h2"))
    state = run(state, Paused(), now_s=59)
    assert members(state) == ["h1"]
    assert state.phase is Phase.RUNNING
    assert run(state, Tick(), now_s=60).reason == "h2 can be used"


def test_a_restart_is_of_one_round() -> None:
    state = started(2, 1, 2)
    assert run(state, Restart((1, 0), "old")) is state
    assert run(state, Restart((1, 1), "mismatch")).reason == "mismatch"


def test_two_processes_cannot_have_one_name() -> None:
    state = run(started(2, 1, 2), Joined("h2", "other", "h9:1"), Arrived("h2", "other"))
    assert holds_name(state, "h2", "1")
    assert state.phase is Phase.RUNNING


def test_an_opening_round_is_given_up_when_a_member_dies_or_never_connects() -> None:
    state = arrive(started(3, 1, 3), "h1", "h2", "h3")
    assert state.phase is Phase.OPENING
    state = run(state, Opened("h1", "1", (1, 2), "s:1", "m:1"))
    lost = run(state, Lost("h1", "1"))
    assert (members(lost), lost.phase, lost.round and lost.round.store) == (["h2", "h3"], Phase.OPENING, "")
    state = run(state, Paused(), Ready("h2", "1", (1, 2)), now_s=19)
    late = run(state, Paused(), now_s=21)
    assert late.reason == "h3 did not connect in time"


def test_a_new_leader_keeps_a_running_round_and_ends_an_opening_one() -> None:
    state = arrive(started(3, 1, 3), "spare")
    state = run(state, TookOver("h2", 2, frozenset({"spare"})), now_s=500)
    assert (state.phase, state.leader, state.term) == (Phase.RUNNING, "h2", 2)
    assert set(state.hosts) == {"h1", "h2", "h3"}
    lost = run(state, TookOver("h3", 3, frozenset({"h2"})), now_s=900)
    assert lost.reason == "h2 is gone"
    lost = arrive(lost, "h1", "h3", now_s=900)
    assert lost.round is not None
    assert lost.round.epoch == (3, 2)
    assert run(lost, TookOver("h1", 4), now_s=50).round.epoch == (4, 3)  # type: ignore[union-attr]
    assert successors(lost) == ["h1", "h3"]


def test_every_short_sequence_of_events() -> None:
    """Sequences of five events of three hosts, one of which is started twice, from before and after the first round."""
    processes = [("a", "1"), ("b", "1"), ("b", "2"), ("c", "1")]

    def events(state: Membership) -> list[Event]:
        found: list[Event] = [Tick(), Park("b", "order"), Admit("b"), TookOver("c", state.term + 1, frozenset({"a"}))]
        for name, incarnation in processes:
            found += [Joined(name, incarnation, "x:1"), Lost(name, incarnation), Left(name, incarnation, finished=True)]
            found += [Left(name, incarnation, failed="no restarts")]
            if holds_name(state, name, incarnation):
                found += [Arrived(name, incarnation)]
            if state.round is not None:
                found += [Arrived(name, incarnation, state.round.epoch), Ready(name, incarnation, state.round.epoch)]
                found += [Opened(name, incarnation, state.round.epoch, "s:1", "m:1"), Restart(state.round.epoch, "order")]
        return found

    first = Membership(Limits(1, 2, **AT_ONCE), "a")  # type: ignore[arg-type]
    seen: set[str] = set()
    queue = deque([(first, 0), (started(2, 1, 2), 3)])
    steps = 0
    while queue:
        state, depth = queue.popleft()
        for event in events(state) if depth < 5 else []:
            after = checked(state, event, 0.0)
            steps += 1
            key = repr(replace(after, version=0, losses={}))
            if key not in seen:
                seen.add(key)
                queue.append((after, depth + 1))
    assert steps > 5_000


# ---------------------------------------------------------------- random jobs


@dataclass
class Agent:
    """What the agent of a host does and knows."""

    name: str
    incarnation: str
    alive: bool = True
    view: Membership | None = None
    after: tuple[int, int] = (0, 0)
    waits: bool = True  # in the rendezvous; otherwise its workers run in the round ``after``


@dataclass
class Job:
    """A job over a network that loses, repeats and delays messages."""

    random: random.Random
    limits: Limits
    agents: dict[str, Agent]
    leader: str
    state: Membership
    now_s: float = 0.0
    messages: list[Event] = field(default_factory=list)
    dead: set[tuple[str, str]] = field(default_factory=set)
    rounds: int = 0
    takeovers: int = 0

    def apply(self, event: Event) -> None:
        before = self.state.round.epoch if self.state.round else None
        self.state = checked(self.state, event, self.now_s)
        self.rounds += (self.state.round.epoch if self.state.round else None) != before

    def send(self, event: Event, loss: float) -> None:
        self.messages += [event] * (0 if self.random.random() < loss else 2 if self.random.random() < 0.1 else 1)

    def agent_step(self, agent: Agent, loss: float) -> None:
        """What an agent does with its view, as in the handler of torchrun."""
        view = agent.view
        self.send(Joined(agent.name, agent.incarnation, f"{agent.name}:1"), loss)
        self.send(Heard(agent.name, agent.incarnation), loss)
        if not agent.waits:
            crashed = loss > 0 and self.random.random() < 0.01
            agent.waits = crashed or (view is not None and must_stop(view, agent.after))
            return
        self.send(Arrived(agent.name, agent.incarnation, agent.after), loss)
        round_ = view.round if view else None
        if view is None or round_ is None or round_.epoch == agent.after:
            return
        rank = rank_in_round(view, agent.name, agent.incarnation)
        if rank == 0 and not round_.store:
            self.send(Opened(agent.name, agent.incarnation, round_.epoch, "s:1", "m:1"), loss)
        elif rank > 0 and round_.store:
            self.send(Ready(agent.name, agent.incarnation, round_.epoch), loss)
        if rank >= 0 and view.phase is Phase.RUNNING:
            agent.after, agent.waits = round_.epoch, False

    def step(self, loss: float) -> None:
        self.now_s += self.random.random()
        self.apply(Tick())
        for agent in self.agents.values():
            if agent.alive:
                if self.random.random() >= loss and (agent.view is None or agent.view.version <= self.state.version):
                    agent.view = self.state
                self.agent_step(agent, loss)
        self.random.shuffle(self.messages)
        late = len(self.messages) // 8 if loss else 0
        now, self.messages = self.messages[late:], self.messages[:late]
        for message in now:
            self.apply(message)
        for name, incarnation in sorted(self.dead):
            if self.random.random() < 0.3:
                self.apply(Lost(name, incarnation))
        self.one_active_round()

    def one_active_round(self) -> None:
        """No two rounds have all their members at work, and no host works in two."""
        working: dict[tuple[int, int], set[str]] = {}
        for agent in self.agents.values():
            if agent.alive and not agent.waits:
                working.setdefault(agent.after, set()).add(agent.name)
        views = [agent.view for agent in self.agents.values() if agent.view is not None]
        known = {view.round.epoch: view.round.members for view in views if view.round is not None}
        active = [epoch for epoch, names in working.items() if epoch in known and {name for name, _ in known[epoch]} == names]
        assert len(active) <= 1, active

    def kill(self, name: str) -> None:
        agent = self.agents[name]
        agent.alive = False
        self.dead.add((name, agent.incarnation))
        if name == self.leader:
            self.take_over()

    def start(self, name: str) -> None:
        self.agents[name] = Agent(name, str(int(self.agents[name].incarnation) + 1))

    def take_over(self) -> None:
        """The successors in a copy of the state ask each other, and the newest copy among them goes on."""
        alive = {name: agent for name, agent in self.agents.items() if agent.alive and agent.view is not None}
        if not alive:
            return
        newest = max((agent.view for agent in alive.values() if agent.view), key=lambda view: (view.term, view.version))
        ended = frozenset(name for name, incarnation in self.dead if holds_name(newest, name, incarnation))
        heirs = [name for name in successors(newest) if name in alive]
        if heirs and may_lead(newest, frozenset(alive), ended):
            self.leader, self.messages = heirs[0], []
            self.state = newest
            self.takeovers += 1
            self.apply(TookOver(heirs[0], newest.term + 1, ended))


@pytest.mark.parametrize("part", range(4))
def test_random_jobs_keep_their_invariants_and_recover(part: int) -> None:
    """Messages are lost, repeated, late and out of order; agents and leaders die and return; then all is quiet."""
    rounds = takeovers = 0
    for seed in range(part * 25, part * 25 + 25):
        source = random.Random(seed)
        count, spares = source.randint(1, 4), source.randint(0, 2)
        limits = Limits(source.randint(1, count), count, **AT_ONCE)  # type: ignore[arg-type]
        names = [f"h{i}" for i in range(count + spares)]
        job = Job(source, limits, {name: Agent(name, "1") for name in names}, names[0], Membership(limits, names[0]))
        for _ in range(source.randint(40, 120)):
            job.step(loss=0.3)
            chance = source.random()
            running = [name for name in names if job.agents[name].alive]
            if chance < 0.04 and len(running) > 1:
                job.kill(source.choice([name for name in running if job.agents[name].view is not None] or running[1:]))
            elif chance < 0.10 and len(running) < len(names):
                job.start(source.choice([name for name in names if not job.agents[name].alive]))
            elif chance < 0.12:
                job.apply(Park(source.choice(names), "order", 20.0))
        for name in names:
            if not job.agents[name].alive:
                job.start(name)
        for _ in range(120):
            job.step(loss=0.0)
        assert job.state.phase is Phase.RUNNING, (seed, job.state)
        at_work = {name for name, agent in job.agents.items() if not agent.waits}
        assert at_work == set(members(job.state)), seed
        assert len(at_work) == count, (seed, job.state)
        rounds, takeovers = rounds + job.rounds, takeovers + job.takeovers
    assert rounds > 100
    assert takeovers > 3
