"""The check ``self``: layers that the backward pass computes again must have the outputs of the forward pass."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from unickpt.base.listing import some
from unickpt.base.logs import logger
from unickpt.base.module_hooks import ModuleHook
from unickpt.training.witness.agreeing import Ranks
from unickpt.training.witness.attributes import attributes_kept
from unickpt.training.witness.counting import require_layers
from unickpt.training.witness.hashes import hashes
from unickpt.training.witness.held import local
from unickpt.training.witness.outputs import floats
from unickpt.training.witness.quiet import ignore, quiet
from unickpt.training.witness.schedule import components
from unickpt.training.witness.surroundings import Generators
from unickpt.training.witness.vote import Ballot, Kind, Subject, Verdict, differing_from_itself, vote

REPEATS = 3
MICRO_BATCH = 0  # of a checked step
_SENDING = ("c10d", "_c10d", "symm_mem", "_dtensor")  # begins of the namespaces of torch's operators that need other ranks
_NOTHING = "the backward pass computes no layer again whose first output was seen"


@dataclass(frozen=True, slots=True)
class Differs:
    """A layer that was computed otherwise the second time.

    Attributes:
        layer: name of the first one.
        steady: it gives one output if it is computed some times more, or nobody knows.
        place: number of the layer in the order in which the forward pass ends them.
        alone: this rank has computed it some times more alone. Another one may have a part in what the others compute.
    """

    layer: str
    steady: bool
    place: int
    alone: bool = True


@dataclass
class _Recording:
    """What is known of a micro-batch.

    Attributes:
        first: hashes of the outputs of the forward pass, by layer.
        several: layers that the forward pass calls more than once.
        random: states of the random generators before the backward pass computes a layer, by layer.
        compared: layers that were computed twice.
        differs: the first one whose outputs differ.
        closed: another micro-batch has begun, so nobody knows which one the backward pass computes.
    """

    first: dict[str, torch.Tensor] = field(default_factory=dict)
    several: set[str] = field(default_factory=set)
    random: dict[str, Any] = field(default_factory=dict)
    compared: set[str] = field(default_factory=set)
    differs: Differs | None = None
    closed: bool = False


class Recomputed:
    """Compares the layers of one micro-batch that are computed twice: activation checkpointing of any kind.

    Attributes:
        paused: what is computed now is no training.

    Args:
        models: the chunks of the model on this rank, without wrappers.
        plain: returns the name of a layer as messages have it.

    Raises:
        ConfigError: one is compiled, so its layers call no hooks.
    """

    def __init__(self, models: Sequence[torch.nn.Module], *, plain: Callable[[str], str] = str) -> None:
        self.paused = False
        self._armed = False
        self._recording: _Recording | None = None
        self._left_out: set[str] = set()
        self._known: set[str] | None = None  # layers that are computed twice; None: not known yet
        self._hooks = []
        for number, model in enumerate(models):
            require_layers(model, "self")
            self._hooks.append(model.register_forward_pre_hook(ModuleHook(quiet(partial(self._begins, model), ignore))))
            for name, module in model.named_modules():
                if module is not model:
                    called = f"chunk {number}: {plain(name)}" if len(models) > 1 else plain(name)
                    before, after = (
                        ModuleHook(quiet(partial(self._before, called), ignore)),
                        ModuleHook(partial(self._computed, model, called)),
                    )
                    self._hooks.append(module.register_forward_pre_hook(before))
                    self._hooks.append(module.register_forward_hook(after, with_kwargs=True))

    def close(self) -> None:
        """Remove the hooks."""
        self._recording = None
        for hook in self._hooks:
            hook.remove()

    def arm(self) -> None:
        """Record the next micro-batch."""
        self._armed, self._recording = True, None

    def take(self) -> tuple[int, Differs | None]:
        """Return how many layers were computed twice, and what differs."""
        recording, self._recording, self._armed = self._recording, None, False
        if recording is None:
            return 0, None
        if recording.compared:
            self._known = (self._known or set()) | recording.compared
        return len(recording.compared), recording.differs

    def _begins(self, model: torch.nn.Module, _module: torch.nn.Module, _args: Any) -> None:
        if self.paused or not model.training or not torch.is_grad_enabled() or _in_backward():
            return
        if self._recording is not None:
            self._recording.closed = True
        if self._armed:
            self._armed, self._recording = False, _Recording()

    def _open(self) -> _Recording | None:
        recording = self._recording
        return None if self.paused or recording is None or recording.closed or recording.differs is not None else recording

    def _before(self, layer: str, module: torch.nn.Module, _args: Any) -> None:
        recording = self._open()
        if recording is not None and layer in recording.first and _in_backward():
            recording.random[layer] = _generators(module).states()

    def _computed(self, model: torch.nn.Module, layer: str, *called: Any) -> None:
        try:
            self._compare(model, layer, *called)
        except Exception as err:  # of any class of tensor: the program that computes it must not notice
            logger.warning("unickpt: witness: the check self leaves out layer %s: %s: %s", layer, type(err).__name__, err)
            self._left_out.add(layer)

    def _compare(
        self, model: torch.nn.Module, layer: str, module: torch.nn.Module, args: Any, kwargs: Any, output: Any
    ) -> None:
        recording = self._open()
        if (
            recording is None
            or not model.training
            or layer in self._left_out
            or (self._known is not None and layer not in self._known)
        ):
            return
        if not _in_backward():
            if layer in recording.first:
                recording.several.add(layer)
            else:
                recording.first[layer] = _hashes(output)
            return
        if layer not in recording.random or layer in recording.several or layer in recording.compared:
            return
        recording.compared.add(layer)
        own = _hashes(output)
        if not torch.equal(recording.first[layer], own):
            again = self._again(module, args, kwargs, recording.random[layer])
            steady = all(torch.equal(each, again[0]) for each in again)
            recording.differs = Differs(layer, steady, [*recording.first].index(layer), bool(again))

    def _again(self, module: torch.nn.Module, args: Any, kwargs: Any, random: Any) -> list[torch.Tensor]:
        """Compute a layer some times more, without a trace. Return hashes of its output; none if it cannot be computed alone.

        Other ranks do not compute it again. So a layer that sends something cannot be, nor one with layers inside, whose hooks
        may gather parameters.
        """
        if any(True for _ in module.children()):
            return []
        generators, buffers, found = _generators(module), [each.detach().clone() for each in module.buffers()], []
        now = generators.states()
        self.paused = True
        try:
            with torch.no_grad(), attributes_kept(module), _Alone():  # type: ignore[no-untyped-call]
                for _ in range(REPEATS):
                    generators.restore(random)
                    found.append(_hashes(module.forward(*args, **kwargs)))
        except Exception:  # such as ``_NeedsOthersError``, or of a layer whose parameters are sharded again
            return []
        finally:
            self.paused = False
            generators.restore(now)
            with torch.no_grad():
                for own, value in zip(module.buffers(), buffers, strict=True):
                    own.copy_(value)
        return found


class _NeedsOthersError(Exception):
    pass


class _Alone(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """No operator sends anything to other ranks: it raises."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace.startswith(_SENDING):
            raise _NeedsOthersError(func.name())
        return func(*args, **(kwargs or {}))


class Selves:
    """The check in one job. ``check`` exchanges something, and is called on every rank.

    Attributes:
        off: why nothing is compared any more, or ''.

    Args:
        recomputed: of this rank.
        ranks: all of the job.
        together: global ranks that compute parts of the same layers, such as those of tensor parallelism, this one among them.
    """

    def __init__(self, recomputed: Recomputed, ranks: Ranks, together: Collection[int] = ()) -> None:
        self.recomputed, self.off = recomputed, ""
        self._ranks, self._together = ranks, {ranks.rank, *together}
        self._gated = False

    def check(self, step: int) -> list[Verdict] | None:
        """Return the verdicts about layers that were computed twice; None if there is no such layer.

        Args:
            step: that begins now.
        """
        compared, differs = self.recomputed.take()
        own = [compared, differs is not None, differs is not None and not differs.steady]
        every = self._ranks.gather(torch.tensor(own, device="cpu").long())
        voters = [at for at, each in enumerate(every[:, 0].tolist()) if each]
        if not voters:
            if not self._gated:
                self._stop(_NOTHING)
            return None
        gated, self._gated = self._gated, True
        if not bool(every[:, 1].any()):
            return []
        ranks = self._ranks.ranks
        told = [(ranks[at], *each) for at, each in enumerate(self._ranks.gather_objects((differs, self._together)))]
        computing = components([{ranks[at] for at in voters} & own for rank, _, own in told])
        suspicions = suspicions_of({rank: found for rank, found, _ in told if found is not None}, computing)
        named = some(sorted({each.layer for each in suspicions}), most=3)
        if bool(every[:, 2].any()):
            self._stop("an operator of the model has another result each time")
            ballots = [Ballot(ranks[at], self._ranks.hosts[at], (0, int(every[at, 2]))) for at in voters]
            verdict = vote(Kind.SDC_COMPUTE, Subject(named, step, MICRO_BATCH, twice=True), ballots)
            return [] if verdict is None else [verdict]
        if 2 * len(suspicions) >= len(computing) and (len(suspicions) > 1 or not gated):
            self._stop(f"the backward pass computes {named} otherwise than the forward pass, as with another random state")
            return []
        ballots = [Ballot(ranks[at], self._ranks.hosts[at], ()) for at in voters]
        return _verdicts(step, ballots, suspicions)

    def _stop(self, why: str) -> None:
        self.off = why
        if self._ranks.leads:
            logger.warning("unickpt: witness: the check self ends: %s", why)


@dataclass(frozen=True, slots=True)
class Suspicion:
    """A layer that was computed otherwise the second time, by ranks that compute parts of the same layers.

    Attributes:
        layer: its name.
        ranks: global ranks, one of which is wrong, ascending.
        following: global ranks that only went on with what these computed.
    """

    layer: str
    ranks: tuple[int, ...]
    following: frozenset[int]


def suspicions_of(found: Mapping[int, Differs], computing: Sequence[Collection[int]]) -> list[Suspicion]:
    """Return who may be wrong, where some compute parts of the same layers: the first layer of all counts.

    Args:
        found: what differs, by global rank.
        computing: global ranks that compute parts of the same layers, each rank once.
    """
    suspicions = []
    for ranks in computing:
        differing = {rank: found[rank] for rank in sorted(ranks) if rank in found}
        if not differing:
            continue
        place = min(each.place for each in differing.values())
        first = {rank: each for rank, each in differing.items() if each.place == place}
        by_all = not all(each.alone for each in first.values())
        candidates = tuple(sorted(ranks)) if by_all else tuple(first)
        following = frozenset(ranks) - set(candidates)
        suspicions.append(Suspicion(next(iter(first.values())).layer, candidates, following))
    return suspicions


def _verdicts(step: int, ballots: Sequence[Ballot], suspicions: Sequence[Suspicion]) -> list[Verdict]:
    """Return the verdicts. ``ballots``: of the ranks that have computed something twice; their values do not count."""
    following = {rank for each in suspicions for rank in each.following}
    ballots = [each for each in ballots if each.rank not in following]
    of_layer: dict[str, list[int]] = {}
    found = []
    for each in suspicions:
        if len(each.ranks) == 1:
            of_layer.setdefault(each.layer, []).append(each.ranks[0])
        else:
            found.append(differing_from_itself(_twice(each.layer, step), ballots, each.ranks, together=True))
    alone = [differing_from_itself(_twice(layer, step), ballots, ranks) for layer, ranks in sorted(of_layer.items())]
    return [*alone, *found]


def _twice(layer: str, step: int) -> Subject:
    return Subject(layer, step, MICRO_BATCH, twice=True)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() >= 0


def _hashes(output: Any) -> torch.Tensor:
    with torch.no_grad():
        return hashes([local(each) for each in floats(output)])


def _generators(module: torch.nn.Module) -> Generators:
    return Generators(_device(module), module)


def _device(module: torch.nn.Module) -> torch.device:
    found = next(iter(module.parameters()), None)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu") if found is None else found.device
