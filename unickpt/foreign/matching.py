"""Names for parameters that somebody knows by number alone: an optimizer's groups, each in the order of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

Shape = tuple[int, ...]
Places = tuple[int, ...]
_LIMIT = 10_000  # of ways at a time


class NoOrderError(ValueError):
    """There is no way to name them, or more than one."""


def matched(
    shapes: Mapping[str, Shape], groups: Sequence[Sequence[Shape]], agrees: Callable[[str, int, int], bool] | None = None
) -> list[list[str]]:
    """Which names the members of the groups have.

    Args:
        shapes: of all parameters, in the model's order; some may be in no group (frozen).
        groups: the shapes of each group's members; a group keeps the model's order.
        agrees: ``(name, group, place) -> bool``, what else is known.

    Returns:
        The names of each group's members.

    Raises:
        NoOrderError: there is no such naming, or there are several.
    """
    names = list(shapes)
    total = sum(map(len, groups))
    if total > len(names):
        raise NoOrderError(f"it trains {total} parameters, the model has {len(names)}")
    # After each name: by how many members every group has got, the number of ways (2 for several) and the last group.
    ways: list[dict[Places, tuple[int, int]]] = [{(0,) * len(groups): (1, -1)}]
    for at, name in enumerate(names):
        found: dict[Places, tuple[int, int]] = {}
        for places, (count, _) in ways[-1].items():
            if total - sum(places) < len(names) - at:
                _count(found, places, count, -1)
            for group, place in enumerate(places):
                if place == len(groups[group]) or groups[group][place] != shapes[name]:
                    continue
                if agrees is None or agrees(name, group, place):
                    _count(found, (*places[:group], place + 1, *places[group + 1 :]), count, group)
        if len(found) > _LIMIT:
            raise NoOrderError("there are too many ways in which its parameters could be those of the model")
        ways.append(found)
    places = tuple(map(len, groups))
    count, _ = ways[-1].get(places, (0, -1))
    if count != 1:
        raise NoOrderError(f"{'several' if count else 'no'} namings of them fit the shapes of the model")
    listed: list[list[str]] = [[] for _ in groups]
    for at in range(len(names), 0, -1):
        _, group = ways[at][places]
        if group >= 0:
            listed[group].append(names[at - 1])
            places = (*places[:group], places[group] - 1, *places[group + 1 :])
    return [each[::-1] for each in listed]


def _count(found: dict[Places, tuple[int, int]], places: Places, count: int, group: int) -> None:
    """One more way to get there; which group was the last is of use where there is one."""
    before = found.get(places, (0, -1))[0]
    found[places] = (min(before + count, 2), group)
