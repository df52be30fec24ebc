"""The report of a load: what an operator needs, and details."""

from __future__ import annotations

import logging

import pytest

from unickpt.checkpoint.load.report import LoadReport


def clean() -> LoadReport:
    report = LoadReport("out/global_step3 (step 3)", "ZeRO-3 on 2 ranks")
    report.seconds = 0.31
    report.add("embed.weight", "weight", "cast", "from the master")
    report.add("embed.weight", "master", "restored")
    report.add("head.weight", "exp_avg", "on other ranks", "held by another stage")
    report.add("rope.cache", "object", "recreated", "computed by the model")
    return report


def test_a_clean_load_is_one_line_and_details(caplog: pytest.LogCaptureFixture) -> None:
    def lines() -> list[str]:
        return [text.removeprefix("unickpt: ") for text in caplog.messages]  # the formats of handlers decide about the name

    with caplog.at_level(logging.INFO, "unickpt"):
        clean().log()
    counts = "1 restored, 1 cast, 1 recreated, 1 on other ranks"
    assert lines() == [f"resumed out/global_step3 (step 3) into ZeRO-3 on 2 ranks: {counts}, in 0.3 s"]
    caplog.clear()
    with caplog.at_level(logging.DEBUG, "unickpt"):
        clean().log()
    assert lines() == clean().lines()
    assert "  master: 1 restored" in clean().lines()


def test_what_is_not_as_it_was_is_told() -> None:
    report = clean()
    report.skipped, report.notes = ["global_step4: a file is missing"], ["the loader was not saved"]
    report.add("rng", "object", "re-seeded", "2 ranks became 3")
    report.add("bias", "weight", "left out", "no rank asks for it")
    report.add("lr_scheduler", "object", "set", "from Megatron's counters")
    needed = [text for text, needed in report.told() if needed]
    assert [text.strip().partition(":")[0] for text in needed] == [
        "resumed out/global_step3 (step 3) into ZeRO-3 on 2 ranks", "skipped global_step4", "note of the saving job",
        "re-seeded", "left out", "set",
    ]  # fmt: skip
