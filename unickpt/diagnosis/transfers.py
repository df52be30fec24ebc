"""Point-to-point calls whose both sides are known, as transfers."""

from __future__ import annotations

import numpy as np

from unickpt.diagnosis.links import TRANSFER, Transfers
from unickpt.diagnosis.view import Calls
from unickpt.timing.records import Op


def transfers_of(calls: Calls) -> Transfers:
    """From when both had entered until the receiver had it: whoever comes late has not made the link slow.

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
    out["ns"] = np.maximum(receives["end_ns"] - np.maximum(sends["call_ns"], receives["call_ns"]), 0)
    return out
