"""What the witness of a job has found, in ``diagnose``, ``top``, ``report`` and ``metrics``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.diagnosis.reports.jobs import job_of_four
from unickpt.api.witness import note_of
from unickpt.base.witness_notes import FILE, MOST, WitnessNote, note, read_notes
from unickpt.cli.main import main
from unickpt.training.witness.nonfinite import Cause, NonFinite, Place
from unickpt.training.witness.vote import Ballot, Kind, Subject, vote

TEXT = "SDC_REPLICA step 12: rank 2 (on c) holds another value of blocks.0.weight than 2 other ranks"


def found() -> WitnessNote:
    verdict = vote(
        Kind.SDC_REPLICA, Subject("blocks.0.weight", 12), [Ballot(rank, "abc"[rank], (rank // 2,)) for rank in range(3)]
    )
    assert verdict is not None
    return note_of(verdict, 1_700_000_000_000_000_000)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    job_of_four(tmp_path)
    note(tmp_path, found())
    return tmp_path


def test_a_verdict_as_a_note() -> None:
    told = found()
    assert (told.kind, told.step, told.ranks, told.hosts) == ("SDC_REPLICA", 12, (2,), ("c",))
    assert told.text == TEXT
    assert told.next.startswith("test the memory and the GPU of c; ")
    place = Place("blocks.1", backward=False, micro_batch=0)
    values = note_of(NonFinite(place, 7, 1, "b", Cause.HARDWARE), 1)
    assert (values.kind, values.step, values.ranks, values.hosts) == ("NONFINITE", 7, (1,), ("b",))
    assert "blocks.1" in values.text


def test_notes_are_read_in_their_order_and_what_is_malformed_is_left_out(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for number, place in enumerate(folders):
        place.mkdir()
        for at in range(MOST):
            note(place, WitnessNote("NONFINITE", at, (number,), ("h",), "x" * 10_000, "y", 2 * at + number))
    with (folders[0] / FILE).open("a") as file:
        file.write('nothing\n{"kind": 1}\n[]\n' + "[" * 5000 + "\n")
    read = read_notes(folders)
    assert [each.at_ns for each in read] == list(range(MOST, 2 * MOST))
    assert len(read[0].text) == 2048
    (folders[1] / FILE).unlink()
    (folders[1] / FILE).symlink_to(folders[0] / FILE)
    assert len(read_notes([folders[1]])) == 0


def test_diagnose_tells_it_and_says_that_something_is_wrong(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", str(folder)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"witness: {TEXT}"
    assert lines[1].startswith("next: test the memory and the GPU of c")
    assert main(["diagnose", str(folder), "--json"]) == 1
    (entry,) = json.loads(capsys.readouterr().out)["witness"]
    assert (entry["kind"], entry["ranks"], entry["hosts"], entry["text"]) == ("SDC_REPLICA", [2], ["c"], TEXT)


def test_top_tells_it_first(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", str(folder), "--once"]) == 0
    assert capsys.readouterr().out.splitlines()[1] == f"witness: {TEXT}"


def test_the_report_has_it_among_the_verdicts(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    assert main(["report", str(folder), "-o", str(page), "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)["witness"]
    assert entry["step"] == 12
    data: dict[str, Any] = json.loads(page.read_text().partition('id="data">')[2].partition("</script>")[0])
    first = data["verdicts"][0]
    assert (first["syndrome"], first["ranks"], first["hosts"], first["sentence"]) == ("SDC_REPLICA", "2", ["c"], TEXT)
    assert data["verdicts_in_all"] == len(data["verdicts"])


def test_metrics_count_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("prometheus_client", reason="the extra 'metrics' is not installed")
    note(folder, found())
    assert main(["metrics", str(folder)]) == 0
    assert 'unickpt_witness_verdicts{host="c",kind="SDC_REPLICA",rank="2"} 2.0' in capsys.readouterr().out
