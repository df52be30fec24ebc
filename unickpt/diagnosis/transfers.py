"""Point-to-point calls whose both sides are known, as transfers."""

from __future__ import annotations

import numpy as np

from unickpt.diagnosis.links import TRANSFER, Ints, Transfers
from unickpt.diagnosis.view import Calls
from unickpt.timing.records import Op

AT_ONCE_NS = 50_000  # after the beginning of a wait: it has not waited


def begun(send_call_ns: Ints, receive_call_ns: Ints, receive_wait_ns: Ints) -> Ints:
    """When transfers have begun, ``[n]``, all on one clock; a wait that is not known is 0."""
    found: Ints = np.maximum(np.maximum(send_call_ns, receive_call_ns), receive_wait_ns)
    return found


def transfers_of(calls: Calls) -> Transfers:
    """From when both had entered, and the receiver waited, until it had it: whoever comes late has not made the link slow.

    What had come before the receiver waited is left out. It was seen only when somebody waited (gloo does not tell before),
    so that nothing is known of how long it took.

    Args:
        calls: of all ranks, on one clock.
    """
    single = calls[(calls["source"] >= 0) & (calls["destination"] >= 0)]
    sends, receives = single[single["op"] == Op.SEND], single[(single["op"] == Op.RECEIVE) & (single["end_ns"] > 0)]
    names = ["comm", "source", "destination", "seq"]
    if not len(sends) or not len(receives):
        return np.zeros(0, TRANSFER)
    keys = np.stack([np.r_[sends[name], receives[name]].astype(np.int64) for name in names], axis=1)
    key = np.unique(keys, axis=0, return_inverse=True)[1].reshape(-1)
    _, at, of = np.intersect1d(key[: len(sends)], key[len(sends) :], return_indices=True)
    sends, receives = sends[at], receives[of]
    out = np.zeros(len(at), TRANSFER)
    out["source"], out["destination"] = sends["source"], sends["destination"]
    out["bytes"] = receives["bytes"]
    out["ns"] = np.maximum(receives["end_ns"] - begun(sends["call_ns"], receives["call_ns"], receives["wait_ns"]), 0)
    unknown = (receives["wait_ns"] > np.maximum(sends["call_ns"], receives["call_ns"])) & (out["ns"] < AT_ONCE_NS)
    known: Transfers = out[~unknown]
    return known
