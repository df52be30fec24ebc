"""Saves of one checkpoint."""

from __future__ import annotations

from collections.abc import Callable

from unickpt.checkpoint.coordination.message_exchange import Message, MessageExchange
from unickpt.checkpoint.save.requests import SaveRequest, SaveResult
from unickpt.checkpoint.save.saver import Saver
from unickpt.checkpoint.save.shards import Contribution


def save(
    contribute: Callable[[Message], Contribution], *, save_dir: str, tag: str, save_latest: bool, exchange: MessageExchange
) -> SaveResult:
    """Save one checkpoint synchronously, with a new ``Saver``.

    Raises:
        CoordinationError: a rank did not arrive in time.
    """
    result = Saver().save(SaveRequest(contribute, save_dir, tag, save_latest), exchange).result
    assert result is not None  # otherwise the call has raised
    return result
