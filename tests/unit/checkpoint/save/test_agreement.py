"""Values that should be the same on all ranks: fingerprints of them, and what is said where they are not."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from tests.support.rank_threads import on_all_ranks
from unickpt.base.errors import CoordinationError, FormatError
from unickpt.checkpoint.coordination.message_exchange import MessageExchange
from unickpt.checkpoint.format.manifest import OptimizerRecord, ParameterGroup, merge_optimizers, optimizer_from_json
from unickpt.checkpoint.save.agreement import message_of, notes_of
from unickpt.checkpoint.save.fingerprints import fingerprints
from unickpt.checkpoint.save.opening import announced, opening_of, refusal
from unickpt.checkpoint.save.requests import SaveRequest
from unickpt.checkpoint.save.shards import Contribution


def test_fingerprints_are_equal_only_for_equal_bits() -> None:
    base = torch.arange(1000, dtype=torch.float32)
    swapped, negative = base.clone(), base.clone()
    swapped[[3, 900]] = base[[900, 3]]
    negative[0] = -0.0
    changed = base.clone()
    changed[999] += 1e-4
    found = fingerprints([base, base.clone().view(10, 100), swapped, negative, changed, base[:999]])
    assert found[0] == found[1]
    assert len({*found}) == 5
    assert all(len(text) == 16 for text in found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.complex64, torch.float64])
def test_fingerprints_of_every_size_of_element(dtype: torch.dtype) -> None:
    tensor = torch.tensor([0, 1, 1, 0, 1]).to(dtype)
    other = torch.tensor([0, 1, 0, 1, 1]).to(dtype)
    first, again, different = fingerprints([tensor[1:], tensor.clone()[1:], other[1:]])
    assert first == again != different
    assert fingerprints([]) == []
    assert len(fingerprints([tensor[:0]])[0]) == 16


def test_differences_are_named_once_with_all_their_ranks() -> None:
    follows = "Rank 0's values are stored."
    messages = [
        message_of((), (0, "aa")),
        message_of([("buffer mean", follows), ("buffer count", follows)], (0, "aa")),
        message_of([("buffer mean", follows), ("buffer count", follows)], (1, "bb")),
        message_of([("scalars", "Kept per rank.")], (1, "cc")),
    ]
    replicas, buffers, scalars = notes_of(messages)
    assert replicas.startswith("the values of rank 3 differ from those of rank 2. These ranks are replicas")
    assert buffers == f"differs between rank 1, 2 and rank 0: buffer mean, buffer count. {follows}"
    assert scalars == "differs between rank 3 and rank 0: scalars. Kept per rank."
    assert notes_of([message_of((), None)] * 3) == ()


def test_ranks_name_one_folder_by_one_path_or_by_links_to_one_place(tmp_path: Path) -> None:
    """The path may be linked to other mounts of one file system on other hosts."""

    def arguments(path: str, resolved: str, tag: str = "step1") -> dict[str, str]:
        return {"save_dir": path, "resolved": resolved, "tag": tag}

    assert refusal(arguments("/ck", "/mnt/a/ck"), arguments("/ck", "/mnt/b/ck"), 1) is None
    assert refusal(arguments("/one", "/mnt/a/ck"), arguments("/two", "/mnt/a/ck"), 1) is None
    failure = refusal(arguments("/one", "/mnt/a/one"), arguments("/two", "/mnt/a/two", "step2"), 1)
    assert failure is not None
    assert failure.text == (
        "save_dir is '/one' on this rank and '/two' on rank 0; tag is 'step1' on this rank and 'step2' on rank 0"
    )
    here, there = ({"stands_for": arguments(f"/{name}", f"/mnt/{name}")} for name in ("one", "two"))  # a save in memory
    nested = refusal(here, there, 1)
    assert nested is not None
    assert nested.text == "stands_for.save_dir is '/one' on this rank and '/two' on rank 0"
    here["stands_for"]["resolved"] = "/mnt/two"
    assert refusal(here, there, 1) is None
    (tmp_path / "link").symlink_to(tmp_path)
    made = SaveRequest(_nothing, str(tmp_path / "link"), "step1").arguments
    assert (made["save_dir"], made["resolved"]) == (str(tmp_path / "link"), str(tmp_path.resolve()))


def test_a_late_rank_that_knows_the_folder_by_a_link_joins_no_other_save(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)

    def call(exchange: MessageExchange) -> None:
        save = exchange.separate("save")
        wanted = SaveRequest(_nothing, str(tmp_path / "link" if exchange.rank else tmp_path), "step1")
        if exchange.rank:
            exchange.broadcast("abandoned", None)
            announced(wanted, save, lambda: pytest.fail("rank 0 announces"))
        else:
            save.broadcast("save", opening_of(wanted, skip=False, background=False, known_defect=None).to_json())
            save.abandon("rank 1 is late")
            exchange.broadcast("abandoned", {})

    _, error = on_all_ranks(call, world=2, timeout_s=3)
    assert isinstance(error, CoordinationError)
    assert "rank 1 arrived after the coordinator abandoned this save: rank 1 is late" in str(error)


def _nothing(_: object) -> Contribution:
    raise AssertionError("nothing is saved")


def test_types_of_scalars_survive_the_manifest_and_earlier_ones_have_none() -> None:
    group = ParameterGroup({"step": 3.0, "lr": 0.1}, ("w",), {"step": ("F32", (1,), "cuda")}, ("step",))
    record = OptimizerRecord("Adam", (), (group,))
    body = json.loads(json.dumps(asdict(record)))
    assert optimizer_from_json(body) == record
    assert merge_optimizers(record, [record]) == record
    for member in ("tensors", "repeated"):
        del body["scalars"][0][member]
    earlier = optimizer_from_json(body).scalars[0]
    assert (earlier.tensors, earlier.repeated) == (None, ())


@pytest.mark.parametrize(
    "lie", [["F32", [2], "cpu"], ["F32", [1] * 40, "cpu"], ["F99", [], "cpu"], ["F32", []], 3, ["F32", [], 1]]
)
def test_a_scalar_that_is_described_wrongly_is_refused(lie: object) -> None:
    body = {
        "name": "Adam",
        "groups": [],
        "scalars": [{"hyperparameters": {"step": 1}, "parameters": [], "tensors": {"step": lie}}],
    }
    with pytest.raises(FormatError):
        optimizer_from_json(body)
