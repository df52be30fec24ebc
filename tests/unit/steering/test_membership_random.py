"""Membership: every short sequence of events, and long random ones with lost and repeated messages and dying hosts."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field, replace

import pytest

from tests.unit.steering.checked_events import AT_ONCE, checked, members, started
from unickpt.steering.state.limits import Limits
from unickpt.steering.state.membership import (
    Admit,
    Arrived,
    Committed,
    Event,
    Heard,
    JobPhase,
    Joined,
    Left,
    Lost,
    Measured,
    Membership,
    Opened,
    Park,
    Ready,
    Restart,
    Tick,
    TookOver,
    holds_name,
    must_stop,
    rank_in_round,
    successors,
)
from unickpt.steering.state.quorum import may_lead
from unickpt.steering.state.scores import Score


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
            if self.random.random() < 0.1:
                self.send(Committed(agent.name, agent.incarnation, agent.after, self.random.randint(0, 9)), loss)
            crashed = loss > 0 and self.random.random() < 0.01
            agent.waits = crashed or (view is not None and must_stop(view, agent.after))
            return
        self.send(Arrived(agent.name, agent.incarnation, agent.after), loss)
        check = view.suspects.get(agent.name, 0) if view else 0
        wrong = "broken" if loss and self.random.random() < 0.3 else ""
        self.send(Measured(agent.name, agent.incarnation, check, Score(self.random.uniform(5, 9), wrong=wrong)), loss)
        round_ = view.round if view else None
        if view is None or round_ is None or round_.epoch == agent.after:
            return
        rank = rank_in_round(view, agent.name, agent.incarnation)
        if rank == 0 and not round_.store:
            self.send(Opened(agent.name, agent.incarnation, round_.epoch, "s:1", "m:1"), loss)
        elif rank > 0 and round_.store:
            self.send(Ready(agent.name, agent.incarnation, round_.epoch), loss)
        if rank >= 0 and view.phase is JobPhase.RUNNING:
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
        order = tuple(source.sample([f"h{i}" for i in range(6)], source.choice([0, 2, 3])))
        rules = {**AT_ONCE, "self_check": source.random() < 0.7, "order": order}
        limits = Limits(source.randint(1, count), count, **rules)  # type: ignore[arg-type]
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
        assert job.state.phase is JobPhase.RUNNING, (seed, job.state)
        at_work = {name for name, agent in job.agents.items() if not agent.waits}
        assert at_work == set(members(job.state)), seed
        assert len(at_work) == count, (seed, job.state)
        rounds, takeovers = rounds + job.rounds, takeovers + job.takeovers
    assert rounds > 100
    assert takeovers > 3
