"""Translation between dialects: the pieces of given tensors for every wanted tensor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from unickpt.base.errors import CoverageError, LanguageError
from unickpt.transform.dialects.arrangement import PADDING
from unickpt.transform.dialects.name_templates import Values
from unickpt.transform.dialects.pieces import GridPiece, Link, check_cover
from unickpt.transform.dialects.rules import Rule, Side, TensorPattern

Shapes = Mapping[str, Sequence[int]]
MOST = 1 << 20  # limit of the tensors that one tensor maps to


@dataclass
class Translation:
    """Map from given tensors to wanted tensors (targets).

    Attributes:
        pieces: pieces by target.
        unmatched: targets without a rule.
        without: missing sources by target.
        padding: number of padding elements of a target, if it has any.
        unused: given tensors that are not used, or not completely.
        unread: given tensors that are not used because no model of their dialect reads them.
        source_padding: number of padding elements of each given tensor.
        replicas: given tensors that are replicas of used ones.
    """

    pieces: dict[str, list[GridPiece]] = field(default_factory=dict)
    unmatched: list[str] = field(default_factory=list)
    without: dict[str, list[str]] = field(default_factory=dict)
    padding: dict[str, int] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    source_padding: dict[str, int] = field(default_factory=dict)
    replicas: set[str] = field(default_factory=set)


def translate(
    rules: Sequence[Rule], wanted: Shapes, given: Shapes, sizes: Mapping[str, int], *, outward: bool = False
) -> Translation:
    """Find the pieces of given tensors for all wanted tensors.

    Args:
        rules: rules in order. The first one that matches a wanted tensor and whose other side is given is used.
        wanted, given: shapes by name. Wanted tensors are *here* and given ones *there*; vice versa if ``outward``.
        sizes: sizes of axes that shapes do not determine.
        outward: direction of the rules.

    Raises:
        LanguageError: a shape contradicts its rule; the message names both.
        CoverageError: an element of a wanted tensor has no source, or two.
    """
    found = Translation()
    axis_sizes: dict[tuple[int, str, str], int] = {}  # (rule, source, axis) -> size
    for name, shape in wanted.items():
        made: _TargetPieces | None = None
        for rule, item, values in _rules_of(rules, name, outward):
            other = _TargetPieces(rule, item, name, tuple(shape), values, given, dict(sizes), outward, axis_sizes)
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
        found.replicas |= made.replicas
        if made.padding:
            found.padding[name] = made.padding
        try:
            check_cover(name, shape, made.pieces, less=made.padding)
        except CoverageError as err:
            raise CoverageError(f"{made.rule}: {err}") from None
    found.unused = _unused(found, given)
    return found


def _unused(found: Translation, given: Shapes) -> list[str]:
    """Return the given tensors that are not used, or not completely (without padding)."""
    taken: dict[str, dict[object, int]] = {}  # grid -> elements; a grid with two targets counts once
    for pieces in found.pieces.values():
        for piece in pieces:
            grid = piece.source_start, frozenset((link.source, link.source_step, link.extent) for link in piece.links)
            taken.setdefault(piece.source, {})[grid] = piece.numel
    unused = []
    for name, shape in given.items():
        wanted = math.prod(shape) - found.source_padding.get(name, 0)
        got = sum(taken.get(name, {}).values())
        if name not in taken and name not in found.replicas:
            unused.append(name)
        elif name in taken and got < wanted:
            unused.append(f"{name} ({got:,} of {wanted:,} elements)")
    return unused


def counterpart_shapes(
    rules: Sequence[Rule], given: Shapes, sizes: Mapping[str, int], *, outward: bool = False
) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the given tensors in the other dialect.

    Args:
        rules: rules in order. The first one that matches a given tensor is used.
        given: shapes by name, *there*, or *here* if ``outward``.
        sizes: sizes of axes that shapes do not determine.
        outward: direction of the rules.

    Raises:
        LanguageError: a shape contradicts its rule, or the size of an axis or of padding is unknown.
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
                raise LanguageError("the size of the padding is unknown; it is in the configuration of the model")
            for other in others:
                free = [hole.name for hole in other.name.holes if hole.name not in values]
                assert other.arrangement is not None
                if math.prod(known[axis] for axis in free) > MOST:
                    raise LanguageError(f"has more than {MOST:,} counterparts")
                for point in itertools.product(*(range(known[axis]) for axis in free)):
                    filled = other.name.fill({**values, **dict(zip(free, point, strict=True))})
                    found.setdefault(filled, other.arrangement.shape({**known, PADDING: 0}))
        except KeyError as err:
            raise LanguageError(f"{rule}: {name}: the size of {err} is unknown") from None
        except LanguageError as err:
            raise LanguageError(f"{rule}: {name}: {err}") from None
    return found


def _rules_of(rules: Sequence[Rule], name: str, outward: bool) -> Iterator[tuple[Rule, TensorPattern, Values]]:
    for rule in rules:
        for item in rule.there if outward else (rule.here,):
            values = item.name.match(name)
            if values is not None:
                yield rule, item, values


class _TargetPieces:
    """Pieces of one target by one rule.

    Attributes:
        pieces: all pieces, if nothing is missing.
        missing: missing sources.
        padding: number of padding elements.
        source_padding, replicas: as in ``Translation``, for the sources of this target.
    """

    def __init__(
        self, rule: Rule, item: TensorPattern, name: str, shape: tuple[int, ...], values: Values, given: Shapes,
        sizes: dict[str, int], outward: bool, axis_sizes: dict[tuple[int, str, str], int],
    ) -> None:  # fmt: skip
        self.axis_sizes = axis_sizes
        self.rule, self.name, self.shape, self.values, self.given = rule, name, shape, values, given
        self.pieces: list[GridPiece] = []
        self.missing: set[str] = set()
        self.padding = 0
        self.source_padding: dict[str, int] = {}
        self.replicas: set[str] = set()
        if item.arrangement is None:
            self._same_shape(shape, outward)
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

    def _same_shape(self, shape: tuple[int, ...], outward: bool) -> None:
        """Add the pieces of a rule without arrangements: both sides have the same shape and order."""
        other = self.rule.here if outward else self.rule.there[0]
        for source, weight, term in self._sources(other, {}, {}):
            if tuple(self.given[source]) != shape:
                raise LanguageError(
                    f"{self.rule}: {self.name} has the shape {list(shape)}, {source} has {list(self.given[source])}, but the "
                    "rule requires the same shape"
                )
            links = tuple(Link(extent, dim, 1, dim, 1) for dim, extent in enumerate(shape) if extent > 1)
            zero = (0,) * len(shape)
            if 0 not in shape:
                self.pieces.append(GridPiece(source, self.name, zero, zero, links, weight, term))

    def _solved(self, item: TensorPattern, name: str, shape: Sequence[int], sizes: Mapping[str, int]) -> dict[str, int]:
        assert item.arrangement is not None
        try:
            return item.arrangement.solve(shape, sizes)
        except LanguageError as err:
            raise LanguageError(f"{self.rule}: {name}: {err}") from None

    def _option(self, target: Side, source: Side, sizes: dict[str, int]) -> Iterator[GridPiece]:
        """Yield the pieces of one option of the target."""
        repeats = source.item.indices(source.option) - target.item.indices(target.option)
        for name in target.item.indices(target.option) - source.item.indices(source.option):
            if self.rule.repeat.get(name) == "sum" and self._size(name, sizes) > 1:
                raise LanguageError(f"{self.rule}: {self.name}: a sum over {name!r} cannot be separated into its terms")
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
        """Check that all targets of a source use the same sizes of its axes."""
        axes = source.item.arrangement.axes() if source.item.arrangement else frozenset()
        for axis in sorted(axes & known.keys()):
            before = self.axis_sizes.setdefault((id(self.rule), name, axis), known[axis])
            if before != known[axis]:
                raise LanguageError(
                    f"{self.rule}: {name} {list(self.given[name])}: the size of {axis!r} is {before} for one target and "
                    f"{known[axis]} for {self.name}"
                )

    def _sources(self, item: TensorPattern, values: Values, sizes: Mapping[str, int]) -> Iterator[tuple[str, float, int]]:
        for more, weight, term in self._values(item, [], sizes):
            name = item.name.fill({**self.values, **values, **more})
            if name in self.given:
                yield name, weight, term
            else:
                self.missing.add(name)

    def _values(
        self, item: TensorPattern, axes: Sequence[str], sizes: Mapping[str, int]
    ) -> Iterator[tuple[dict[str, int], float, int]]:
        """Yield the values of the source's holes that the target's name lacks, each with its weight and term."""
        free = [hole.name for hole in item.name.holes if not hole.text and hole.name not in self.values]
        for name in free:
            if self.rule.repeat.get(name) == "same":
                self.replicas.update(_all_of(item, name, self.values, self.given))
        along = [name for name in free if name in axes]
        if math.prod(self._size(name, sizes) for name in along) > MOST:
            raise LanguageError(f"{self.rule}: {self.name}: has more than {MOST:,} sources")
        for point in itertools.product(*(range(self._size(name, sizes)) for name in along)):
            for fixed, weight, term in self._repeats([name for name in free if name not in along], sizes):
                yield {**dict(zip(along, point, strict=True)), **fixed}, weight, term

    def _repeats(self, names: Sequence[str], sizes: Mapping[str, int]) -> Iterator[tuple[dict[str, int], float, int]]:
        """Yield the values of indices that only the source has: one if all are the same, all of a mean or sum."""
        ranges = [range(1 if self.rule.repeat[name] == "same" else self._size(name, sizes)) for name in names]
        if math.prod(len(each) for each in ranges) > MOST:
            raise LanguageError(f"{self.rule}: {self.name}: has more than {MOST:,} repetitions")
        weight = 1.0
        for name, each in zip(names, ranges, strict=True):
            weight /= max(len(each), 1) if self.rule.repeat[name] == "mean" else 1
        for term, point in enumerate(itertools.product(*ranges)):
            yield dict(zip(names, point, strict=True)), weight, term

    def _size(self, name: str, sizes: Mapping[str, int]) -> int:
        if name not in sizes:
            raise LanguageError(f"{self.rule}: {self.name}: the size of {name!r} is unknown")
        return sizes[name]

    def _pieces(
        self,
        target: Side,
        source: Side,
        name: str,
        fixed: Values,
        known: tuple[dict[str, int], int, int],
        weight: float,
        term: int,
    ) -> Iterator[GridPiece]:
        """Yield the pieces of one source, along every common axis, at the fixed values of the others.

        Args:
            target, source: both sides.
            name: name of the source.
            fixed: values of fixed axes.
            known: sizes of axes, and of the paddings of source and target.
            weight, term: as in ``GridPiece``.
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
        outer: list[Link] = []  # repetitions in the target
        for axis, ((source_dim, source_step), (target_dim, target_step)) in steps.items():
            if axis in fixed:
                if not 0 <= int(fixed[axis]) < sizes[axis]:
                    raise LanguageError(f"{self.rule}: {self.name}: {axis} is {fixed[axis]}, expected 0 to {sizes[axis] - 1}")
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
            yield GridPiece(name, self.name, tuple(first), tuple(last), tuple(one), weight, term)


def _all_of(item: TensorPattern, hole: str, values: Values, given: Shapes) -> list[str]:
    """Return the given tensors that differ only in the value of one hole."""
    found = []
    for name in given:
        own = item.name.match(name)
        if own is not None and all(values.get(key, value) == value for key, value in own.items() if key != hole):
            found.append(name)
    return found


def _padding_of(item: TensorPattern, shape: Sequence[int], sizes: Mapping[str, int]) -> int:
    """Return the number of padding elements of a tensor."""
    assert item.arrangement is not None
    return math.prod(shape) - math.prod(item.arrangement.shape({**sizes, PADDING: 0}))


def _without_padding(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes without padding, which differs between the tensors of a rule."""
    return {name: size for name, size in sizes.items() if name != PADDING}


def _merged(links: list[Link]) -> list[Link]:
    """Merge links that are adjacent in one dimension on both sides."""
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
    """Separate links into at most one per dimension of source and target, and the rest.

    Long links without steps in the source are preferred.
    """
    kept: list[Link] = []
    rest: list[Link] = []
    for link in sorted(links, key=lambda link: (link.source_step > 1, -link.extent)):
        free = all(link.source != each.source and link.target != each.target for each in kept)
        (kept if free else rest).append(link)
    return sorted(kept, key=lambda link: link.source), rest
