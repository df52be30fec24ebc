"""OpenTelemetry: what a receiver of OTLP over HTTP is sent."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.unit.diagnosis.agent.made import hung
from tests.unit.diagnosis.reports.jobs import job_of_four
from unickpt.cli.main import main

pytest.importorskip("opentelemetry.sdk")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
traces = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
metrics = pytest.importorskip("opentelemetry.proto.collector.metrics.v1.metrics_service_pb2")


class Receiver:
    """A receiver of OTLP over HTTP.

    Attributes:
        spans, values: what it was sent.
        status: HTTP status of its answers.
    """

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.values: dict[str, list[Any]] = {}
        self.resources: list[Any] = []
        self.status = 200
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver.take(self.path, self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(receiver.status)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                return

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def take(self, path: str, body: bytes) -> None:
        if path == "/v1/traces":
            request = traces.ExportTraceServiceRequest.FromString(body)
            for each in request.resource_spans:
                self.resources.append(each.resource)
                self.spans += [span for scope in each.scope_spans for span in scope.spans]
        else:
            assert path == "/v1/metrics"
            request = metrics.ExportMetricsServiceRequest.FromString(body)
            for each in request.resource_metrics:
                for scope in each.scope_metrics:
                    for metric in scope.metrics:
                        points = metric.sum if metric.HasField("sum") else metric.gauge
                        self.values.setdefault(metric.name, []).extend(points.data_points)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    found = Receiver()
    yield found
    found.server.shutdown()
    found.server.server_close()


def told(span: Any) -> dict[str, Any]:
    """Return the attributes of a span or a value."""
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


def test_steps_calls_and_metrics_arrive(tmp_path: Path, receiver: Receiver, capsys: pytest.CaptureFixture[str]) -> None:
    job_of_four(tmp_path, wall_ms=5000.0)
    assert main(["otlp", str(tmp_path), "--to", receiver.address, "--calls", "--json"]) == 0
    sent = json.loads(capsys.readouterr().out)
    assert (sent["spans"], sent["verdicts"]) == (len(receiver.spans), 0)
    steps = [span for span in receiver.spans if not span.parent_span_id]
    calls = [span for span in receiver.spans if span.parent_span_id]
    assert sorted((told(span)["unickpt.rank"], span.name) for span in steps) == [
        (rank, f"step {step}") for rank in range(4) for step in (0, 1)
    ]
    assert len(calls) == 16
    assert {span.name for span in calls} == {"all_reduce data parallel"}
    by_id = {span.span_id: span for span in steps}
    for call in calls:
        around = by_id[call.parent_span_id]
        assert call.trace_id == around.trace_id
        assert around.start_time_unix_nano <= call.start_time_unix_nano < call.end_time_unix_nano <= around.end_time_unix_nano
    assert min(span.start_time_unix_nano for span in steps) == 6_000_000_000  # on the wall clock
    assert len({span.trace_id for span in steps}) == 2  # one trace for each step, of all ranks
    assert all(span.end_time_unix_nano - span.start_time_unix_nano == 100_000_000 for span in steps)
    late = {told(value)["rank"]: value.as_double for value in receiver.values["unickpt_rank_lateness_seconds"]}
    assert late["2"] == pytest.approx(0.012)
    assert sent["metrics"] == sum(map(len, receiver.values.values()))
    assert {each.key for each in receiver.resources[0].attributes} >= {"service.name", "unickpt.job"}


def test_a_verdict_arrives_as_an_error_and_traces_stay_the_same(tmp_path: Path, receiver: Receiver) -> None:
    hung(tmp_path)
    for _ in range(2):
        assert main(["otlp", str(tmp_path), "--to", receiver.address, "--after", "5"]) == 0
    first, again = [span for span in receiver.spans if span.name.startswith("verdict: ")]
    assert first.name == "verdict: non-communication hang"
    assert first.status.code == 2
    assert first.status.message.startswith("rank 2 has not entered all_reduce #3")
    about = told(first)
    assert about["unickpt.ranks"] == "2"
    assert about["unickpt.line"].startswith("unickpt HANG rank=2 ")
    assert about["unickpt.next"].startswith("the others wait for rank 2")
    assert (again.trace_id == first.trace_id, again.span_id == first.span_id) == (True, False)
    (value,) = receiver.values["unickpt_verdicts"][:1]
    assert told(value)["syndrome"] == "non-communication hang"


def test_a_collector_that_refuses_is_an_error(tmp_path: Path, receiver: Receiver, capsys: pytest.CaptureFixture[str]) -> None:
    job_of_four(tmp_path)
    receiver.status = 400
    assert main(["otlp", str(tmp_path), "--to", receiver.address]) == 2
    said = capsys.readouterr().err
    assert f"{receiver.address}: the collector has not taken the data" in said
    assert said.count("\n") == 1
