"""The dashboard and the alerts that ship: they use metrics and labels that exist."""

from __future__ import annotations

import json
import re

import pytest

from tests.support.repository import REPO
from unickpt.diagnosis.detectors.verdicts import Syndrome
from unickpt.diagnosis.reports import metrics
from unickpt.steering.publishing import metrics as steering_metrics
from unickpt.steering.state.kinds import Standing

FOLDER = REPO / "configs" / "monitoring"
KNOWN = {*metrics.HELP, *steering_metrics.HELP}
METRIC = re.compile(r"\bunickpt_\w+")


def test_the_dashboard_shows_metrics_that_exist() -> None:
    board = json.loads((FOLDER / "grafana-unickpt.json").read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert {name for each in expressions for name in METRIC.findall(each)} <= KNOWN
    assert all(METRIC.search(each) for each in expressions)
    for each in expressions:  # each metric of the chosen jobs
        assert len(METRIC.findall(each)) == each.count('{job_name=~"$job_name"}'), each
    variables = {each["name"]: each for each in board["templating"]["list"]}
    assert variables["job_name"]["allValue"] == ".*", "values without a name of the job too"
    places = [tuple(panel["gridPos"].values()) for panel in board["panels"]]
    cells = [(x + i, y + j) for x, y, width, height in places for i in range(width) for j in range(height)]
    assert len(cells) == len(set(cells))  # no panel covers another one
    assert max(x for x, _ in cells) < 24


def test_the_alerts_use_metrics_and_labels_that_exist() -> None:
    yaml = pytest.importorskip("yaml")
    (group,) = yaml.safe_load((FOLDER / "prometheus-alerts.yaml").read_text())["groups"]
    expressions = {rule["alert"]: rule["expr"] for rule in group["rules"]}
    assert {name for each in expressions.values() for name in METRIC.findall(each)} <= KNOWN
    patterns = [found for each in expressions.values() for found in re.findall(r'syndrome=~"([^"]+)"', each)]
    caught = [syndrome for syndrome in Syndrome for pattern in patterns if re.fullmatch(pattern, syndrome.value)]
    assert sorted(each.value for each in caught) == sorted(each.value for each in Syndrome)  # each by one alert
    assert all("{{ $labels.job_name }}" in rule["annotations"]["summary"] for rule in group["rules"])
    assert f'state="{Standing.PARKED.value}"' in expressions["HostsParked"]
    assert all(rule["annotations"]["summary"] and rule["annotations"]["description"] for rule in group["rules"])
