"""What a job has passed."""

from __future__ import annotations

from unickpt.training.witness.record import passed_by_all


def test_a_job_has_passed_what_its_slowest_rank_passed() -> None:
    of_ranks = {0: {"rest": 40, "replicas": 50}, 1: {"rest": 50, "replicas": 50}}
    assert passed_by_all(of_ranks, ["replicas", "rest"]) == (40, ("replicas", "rest"))
    assert passed_by_all(of_ranks | {2: {"rest": 50}}, ["replicas"]) == (0, ("replicas",))
    assert passed_by_all({}, []) == (0, ())
