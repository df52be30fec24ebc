"""Names for parameters that an optimizer identifies by number: groups of shapes, each in the order of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from unickpt.base.arrays import Shape

Places = tuple[int, ...]
_LIMIT = 10_000  # partial assignments that are tracked at a time


class NoOrderError(ValueError):
    """No assignment of names exists, or more than one."""


def match_names(
    shapes: Mapping[str, Shape], groups: Sequence[Sequence[Shape | None]], agrees: Callable[[str, int, int], bool] | None = None
) -> list[list[str]]:
    """Return the names of the members of each group.

    Args:
        shapes: shape of every parameter by name, in the order of the model. Frozen parameters may be in no group.
        groups: shapes of each group's members, in the order of the model. None: the shape is unknown.
        agrees: ``(name, group, position) -> bool``, an additional test of an assignment.

    Returns:
        The names of each group's members.

    Raises:
        NoOrderError: no assignment fits, or several do.
    """
    names = list(shapes)
    total = sum(map(len, groups))
    if total > len(names):
        raise NoOrderError(f"it trains {total} parameters, but the model has {len(names)}")
    # After each name: members assigned per group -> (number of assignments, where 2 means several; last group).
    ways: list[dict[Places, tuple[int, int]]] = [{(0,) * len(groups): (1, -1)}]
    for at, name in enumerate(names):
        found: dict[Places, tuple[int, int]] = {}
        for places, (count, _) in ways[-1].items():
            if total - sum(places) < len(names) - at:
                _count(found, places, count, -1)
            for group, place in enumerate(places):
                if place == len(groups[group]) or groups[group][place] not in (None, shapes[name]):
                    continue
                if agrees is None or agrees(name, group, place):
                    _count(found, (*places[:group], place + 1, *places[group + 1 :]), count, group)
        if len(found) > _LIMIT:
            raise NoOrderError("too many assignments of parameters are possible")
        ways.append(found)
    places = tuple(map(len, groups))
    count, _ = ways[-1].get(places, (0, -1))
    if count != 1:
        raise NoOrderError(f"{'several' if count else 'no'} assignments of names fit the shapes of the model")
    listed: list[list[str]] = [[] for _ in groups]
    for at in range(len(names), 0, -1):
        _, group = ways[at][places]
        if group >= 0:
            listed[group].append(names[at - 1])
            places = (*places[:group], places[group] - 1, *places[group + 1 :])
    return [each[::-1] for each in listed]


def _count(found: dict[Places, tuple[int, int]], places: Places, count: int, group: int) -> None:
    """Add ways to reach a state. The last group is only used if there is one way."""
    before = found.get(places, (0, -1))[0]
    found[places] = (min(before + count, 2), group)
