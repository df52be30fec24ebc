"""From one dialect to another: of every tensor that is wanted, the pieces of tensors that there are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from unickpt.errors import CoverageError, LanguageError
from unickpt.language.arrangement import PADDING
from unickpt.language.names import Values
from unickpt.language.pieces import Link, Piece, check_cover
from unickpt.language.rules import Item, Rule, Side

Shapes = Mapping[str, Sequence[int]]
MOST = 1 << 20  # tensors of one


@dataclass
class Translation:
    """How wanted tensors come from given ones.

    Attributes:
        pieces: by target.
        unmatched: targets that no rule knows.
        without: targets whose rule knows sources that are not there, and which those are.
        padding: elements of each target that come from nowhere, where there are any.
        unused: given tensors that nothing has come from, or not all of which is somewhere.
        source_padding: elements of each given tensor that are nothing on the other side.
        alike: given tensors that are the same as others that were taken.
    """

    pieces: dict[str, list[Piece]] = field(default_factory=dict)
    unmatched: list[str] = field(default_factory=list)
    without: dict[str, list[str]] = field(default_factory=dict)
    padding: dict[str, int] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)
    source_padding: dict[str, int] = field(default_factory=dict)
    alike: set[str] = field(default_factory=set)


def translate(
    rules: Sequence[Rule], wanted: Shapes, given: Shapes, sizes: Mapping[str, int], *, outward: bool = False
) -> Translation:
    """Find pieces of given tensors for all wanted ones.

    Args:
        rules: the first one that knows a wanted tensor, and whose other side is given, counts.
        wanted, given: shapes by name. Wanted are tensors of *here*, given ones of *there*; the other way round if
            ``outward``.
        sizes: of axes, as far as shapes do not tell them.

    Raises:
        LanguageError: a shape contradicts its rule; names rule and tensor.
        CoverageError: an element of a wanted tensor would come from none, or from two, of the given.
    """
    found = Translation()
    told: dict[tuple[int, str, str], int] = {}  # rule, source, axis -> its size
    for name, shape in wanted.items():
        made: _Made | None = None
        for rule, item, values in _rules_of(rules, name, outward):
            other = _Made(rule, item, name, tuple(shape), values, given, dict(sizes), outward, told)
            made = made if made is not None and other.missing else other
            if not made.missing:
                break
        if made is None:
            found.unmatched.append(name)
            continue
        if made.missing:
            found.without[name] = sorted(made.missing)
            continue
        found.pieces[name] = made.pieces
        found.source_padding |= made.source_padding
        found.alike |= made.alike
        if made.padding:
            found.padding[name] = made.padding
        try:
            check_cover(name, shape, made.pieces, less=made.padding)
        except CoverageError as err:
            raise CoverageError(f"{made.rule}: {err}") from None
    found.unused = _unused(found, given)
    return found


def _unused(found: Translation, given: Shapes) -> list[str]:
    """Given tensors of which nothing, or not all but padding, has been asked for."""
    taken: dict[str, dict[object, int]] = {}  # grid -> elements: one that goes to two targets counts once
    for pieces in found.pieces.values():
        for piece in pieces:
            grid = piece.source_start, frozenset((link.source, link.source_step, link.extent) for link in piece.links)
            taken.setdefault(piece.source, {})[grid] = piece.numel
    unused = []
    for name, shape in given.items():
        wanted = math.prod(shape) - found.source_padding.get(name, 0)
        got = sum(taken.get(name, {}).values())
        if name not in taken and name not in found.alike:
            unused.append(name)
        elif name in taken and got < wanted:
            unused.append(f"{name} ({got:,} of {wanted:,} elements)")
    return unused


def listed(
    rules: Sequence[Rule], given: Shapes, sizes: Mapping[str, int], *, outward: bool = False
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that given ones are in the other dialect.

    Args:
        rules: the first one that knows a given tensor counts.
        given: shapes by name, of *there*; of *here* if ``outward``.
        sizes: of axes, as far as shapes do not tell them.

    Raises:
        LanguageError: a shape contradicts its rule, or the size of an axis, or of padding, is not known.
    """
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in given.items():
        match = next(_rules_of(rules, name, not outward), None)
        if match is None:
            continue
        rule, item, values = match
        others = rule.there if outward else (rule.here,)
        if item.arrangement is None:
            found[others[0].name.fill(values)] = tuple(shape)
            continue
        try:
            known = {**sizes, **item.arrangement.solve(shape, sizes)}
            if item.padded and PADDING not in known:
                raise LanguageError("how much of it is padding is not known; the model's configuration tells it")
            for other in others:
                free = [hole.name for hole in other.name.holes if hole.name not in values]
                assert other.arrangement is not None
                if math.prod(known[axis] for axis in free) > MOST:
                    raise LanguageError(f"of more than {MOST:,} tensors")
                for point in itertools.product(*(range(known[axis]) for axis in free)):
                    filled = other.name.fill({**values, **dict(zip(free, point, strict=True))})
                    found.setdefault(filled, other.arrangement.shape({**known, PADDING: 0}))
        except KeyError as err:
            raise LanguageError(f"{rule}: {name}: the size of {err} is not known") from None
        except LanguageError as err:
            raise LanguageError(f"{rule}: {name}: {err}") from None
    return found


def _rules_of(rules: Sequence[Rule], name: str, outward: bool) -> Iterator[tuple[Rule, Item, Values]]:
    for rule in rules:
        for item in rule.there if outward else (rule.here,):
            values = item.name.match(name)
            if values is not None:
                yield rule, item, values


class _Made:
    """Pieces of one target by its rule.

    Attributes:
        pieces: all of them, if nothing is missing.
        missing: sources that the rule knows and that are not there.
        padding: elements that come from nowhere.
        source_padding, alike: as in ``Translation``, of this target's sources.
    """

    def __init__(
        self, rule: Rule, item: Item, name: str, shape: tuple[int, ...], values: Values, given: Shapes, sizes: dict[str, int],
        outward: bool, told: dict[tuple[int, str, str], int],
    ) -> None:  # fmt: skip
        self.told = told
        self.rule, self.name, self.shape, self.values, self.given = rule, name, shape, values, given
        self.pieces: list[Piece] = []
        self.missing: set[str] = set()
        self.padding = 0
        self.source_padding: dict[str, int] = {}
        self.alike: set[str] = set()
        if item.arrangement is None:
            self._alike(shape, outward)
            return
        sizes.update(_without_padding(self._solved(item, name, shape, sizes)))
        covered = 0
        for here, there in rule.pairs():
            target, source = (there, here) if outward else (here, there)
            if target.item is not item:
                continue
            for piece in self._option(target, source, sizes):
                self.pieces.append(piece)
                covered += piece.numel if piece.term == 0 else 0
        if item.padded and not self.missing:
            self.padding = math.prod(shape) - covered

    def _alike(self, shape: tuple[int, ...], outward: bool) -> None:
        """The same shape and order on both sides."""
        other = self.rule.here if outward else self.rule.there[0]
        for source, weight, term in self._sources(other, {}, {}):
            if tuple(self.given[source]) != shape:
                raise LanguageError(
                    f"{self.rule}: {self.name} has the shape {list(shape)}, {source} has {list(self.given[source])}, and the "
                    "rule says that they are alike"
                )
            links = tuple(Link(extent, dim, 1, dim, 1) for dim, extent in enumerate(shape) if extent > 1)
            zero = (0,) * len(shape)
            if 0 not in shape:
                self.pieces.append(Piece(source, self.name, zero, zero, links, weight, term))

    def _solved(self, item: Item, name: str, shape: Sequence[int], sizes: Mapping[str, int]) -> dict[str, int]:
        assert item.arrangement is not None
        try:
            return item.arrangement.solve(shape, sizes)
        except LanguageError as err:
            raise LanguageError(f"{self.rule}: {name}: {err}") from None

    def _option(self, target: Side, source: Side, sizes: dict[str, int]) -> Iterator[Piece]:
        """Pieces of one option of the target."""
        repeats = source.item.indices(source.option) - target.item.indices(target.option)
        for name in target.item.indices(target.option) - source.item.indices(source.option):
            if self.rule.repeat.get(name) == "sum" and self._size(name, sizes) > 1:
                raise LanguageError(f"{self.rule}: {self.name}: what is a sum over {name!r} cannot be told apart again")
        holes = {hole.name for hole in source.item.name.holes if not hole.text}
        for values, weight, term in self._values(source.item, target.item.axes(target.option), sizes):
            name = source.item.name.fill({**self.values, **values})
            if name not in self.given:
                self.missing.add(name)
                continue
            of = {PADDING: 0, **sizes, **self._solved(source.item, name, self.given[name], sizes)}
            to = {PADDING: 0, **self._solved(target.item, self.name, self.shape, _without_padding(of))}
            known = _without_padding({**of, **to})
            self._agree(name, known, source)
            if of[PADDING]:
                self.source_padding[name] = _padding_of(source.item, self.given[name], known)
            for fixed, part, more in self._repeats(sorted(repeats - holes), known):
                at = {**self.values, **values, **fixed}
                yield from self._pieces(target, source, name, at, (known, of[PADDING], to[PADDING]), weight * part, term + more)

    def _agree(self, name: str, known: Mapping[str, int], source: Side) -> None:
        """What one source tells of its axes holds for all targets that are made of it."""
        axes = source.item.arrangement.axes() if source.item.arrangement else frozenset()
        for axis in sorted(axes & known.keys()):
            before = self.told.setdefault((id(self.rule), name, axis), known[axis])
            if before != known[axis]:
                raise LanguageError(
                    f"{self.rule}: {name} {list(self.given[name])}: {axis!r} would be {before} for one of the tensors that are "
                    f"made of it, and {known[axis]} for {self.name}"
                )

    def _sources(self, item: Item, values: Values, sizes: Mapping[str, int]) -> Iterator[tuple[str, float, int]]:
        for more, weight, term in self._values(item, [], sizes):
            name = item.name.fill({**self.values, **values, **more})
            if name in self.given:
                yield name, weight, term
            else:
                self.missing.add(name)

    def _values(self, item: Item, axes: Sequence[str], sizes: Mapping[str, int]) -> Iterator[tuple[dict[str, int], float, int]]:
        """Values of the holes of a source's name that the target's name does not tell, with the weight of each and its term."""
        free = [hole.name for hole in item.name.holes if not hole.text and hole.name not in self.values]
        for name in free:
            if self.rule.repeat.get(name) == "same":
                self.alike.update(_all_of(item, name, self.values, self.given))
        along = [name for name in free if name in axes]
        if math.prod(self._size(name, sizes) for name in along) > MOST:
            raise LanguageError(f"{self.rule}: {self.name}: of more than {MOST:,} tensors")
        for point in itertools.product(*(range(self._size(name, sizes)) for name in along)):
            for fixed, weight, term in self._repeats([name for name in free if name not in along], sizes):
                yield {**dict(zip(along, point, strict=True)), **fixed}, weight, term

    def _repeats(self, names: Sequence[str], sizes: Mapping[str, int]) -> Iterator[tuple[dict[str, int], float, int]]:
        """Indices of the source alone: one value of those that are the same, all of those that are added."""
        ranges = [range(1 if self.rule.repeat[name] == "same" else self._size(name, sizes)) for name in names]
        if math.prod(len(each) for each in ranges) > MOST:
            raise LanguageError(f"{self.rule}: {self.name}: more than {MOST:,} repetitions")
        weight = 1.0
        for name, each in zip(names, ranges, strict=True):
            weight /= max(len(each), 1) if self.rule.repeat[name] == "mean" else 1
        for term, point in enumerate(itertools.product(*ranges)):
            yield dict(zip(names, point, strict=True)), weight, term

    def _size(self, name: str, sizes: Mapping[str, int]) -> int:
        if name not in sizes:
            raise LanguageError(f"{self.rule}: {self.name}: the size of {name!r} is not known")
        return sizes[name]

    def _pieces(
        self, target: Side, source: Side, name: str, fixed: Values, known: tuple[dict[str, int], int, int], weight: float,
        term: int,
    ) -> Iterator[Piece]:  # fmt: skip
        """Pieces of one source: along every axis that both have, at the values of those that are fixed.

        Args:
            known: sizes of axes, and of the paddings of source and target.
        """
        sizes = known[0]
        assert target.item.arrangement is not None
        assert source.item.arrangement is not None
        for axis in sorted(target.item.arrangement.axes() | source.item.arrangement.axes()):
            self._size(axis, sizes)
        of = source.item.arrangement.digits({**sizes, PADDING: known[1]}, source.option)
        to = target.item.arrangement.digits({**sizes, PADDING: known[2]}, target.option)
        begin, end = [digits.start for digits in of], [digits.start for digits in to]
        steps: dict[str, list[tuple[int, int]]] = {}
        for at, tensor in enumerate((of, to)):
            for dim, digits in enumerate(tensor):
                for axis, step in digits.steps.items():
                    steps.setdefault(axis, [(-1, 0), (-1, 0)])[at] = (dim, step)
        links: list[Link] = []
        outer: list[Link] = []  # repeated on the side of the target
        for axis, ((source_dim, source_step), (target_dim, target_step)) in steps.items():
            if axis in fixed:
                if not 0 <= int(fixed[axis]) < sizes[axis]:
                    raise LanguageError(f"{self.rule}: {self.name}: {axis} is {fixed[axis]}, of {sizes[axis]}")
                if source_dim >= 0:
                    begin[source_dim] += int(fixed[axis]) * source_step
                if target_dim >= 0:
                    end[target_dim] += int(fixed[axis]) * target_step
            elif sizes[axis] != 1:
                link = Link(sizes[axis], source_dim, source_step, target_dim, target_step)
                (outer if min(source_dim, target_dim) < 0 else links).append(link)
        one, several = _separate(_merged(links))
        several += outer
        if not all(link.extent for link in one):
            return
        for point in itertools.product(*(range(link.extent) for link in several)):
            first, last = list(begin), list(end)
            for index, link in zip(point, several, strict=True):
                if link.source >= 0:
                    first[link.source] += index * link.source_step
                last[link.target] += index * link.target_step
            yield Piece(name, self.name, tuple(first), tuple(last), tuple(one), weight, term)


def _all_of(item: Item, hole: str, values: Values, given: Shapes) -> list[str]:
    """Given tensors that differ from others in this hole alone."""
    found = []
    for name in given:
        own = item.name.match(name)
        if own is not None and all(values.get(key, value) == value for key, value in own.items() if key != hole):
            found.append(name)
    return found


def _padding_of(item: Item, shape: Sequence[int], sizes: Mapping[str, int]) -> int:
    """Elements of a tensor that are padding."""
    assert item.arrangement is not None
    return math.prod(shape) - math.prod(item.arrangement.shape({**sizes, PADDING: 0}))


def _without_padding(sizes: Mapping[str, int]) -> dict[str, int]:
    """Sizes that hold for all tensors of a rule; each has a padding of its own."""
    return {name: size for name, size in sizes.items() if name != PADDING}


def _merged(links: list[Link]) -> list[Link]:
    """Axes that follow one another in one dimension on both sides are one."""
    found: list[Link] = []
    for link in sorted(links, key=lambda link: (link.source, -link.source_step)):
        last = found[-1] if found else None
        if (
            last is not None
            and (last.source, last.target) == (link.source, link.target)
            and last.source_step == link.extent * link.source_step
            and last.target_step == link.extent * link.target_step
        ):
            found[-1] = Link(last.extent * link.extent, link.source, link.source_step, link.target, link.target_step)
        else:
            found.append(link)
    return found


def _separate(links: list[Link]) -> tuple[list[Link], list[Link]]:
    """At most one for each dimension of source and target, the longest ones without steps in the source; and the rest."""
    kept: list[Link] = []
    rest: list[Link] = []
    for link in sorted(links, key=lambda link: (link.source_step > 1, -link.extent)):
        free = all(link.source != each.source and link.target != each.target for each in kept)
        (kept if free else rest).append(link)
    return sorted(kept, key=lambda link: link.source), rest
