"""Links that are slow from the beginning of a round: how much of their own past is needed to name them."""

from __future__ import annotations

import numpy as np
import pytest

from unickpt.diagnosis.detectors.tcp_links import LINK, LinkHistory, Links

SECOND = 1_000_000_000


def ring(slow: bool) -> Links:
    """Return the links of a ring of three hosts. Both links of host b have 3 Mbit/s if they are slow."""
    links = np.zeros(3, LINK)
    links["source"], links["destination"] = [0, 1, 2], [1, 2, 0]
    links["ns_per_byte"] = [2667.0, 2667.0, 100.0] if slow else 100.0
    links["share"] = [0.6, 0.6, 0.02] if slow else 0.02
    return links


@pytest.mark.parametrize(("sound", "named"), [(0, None), (1, None), (4, None), (5, 7), (6, 6), (7, 5), (8, 4), (60, 4)])
def test_a_link_that_is_slow_from_the_first_seconds_on_is_not_named(sound: int, named: int | None) -> None:
    """Looks are one second apart. ``named``: seconds from the first slow look to the first verdict."""
    history, found = LinkHistory(), None
    for look in range(sound + 100):
        if history.slow(ring(look >= sound), look * SECOND, {0: "a", 1: "b", 2: "c"}) and found is None:
            found = look - sound
    assert found == named
