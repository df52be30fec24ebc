"""Steps, calls, metrics and verdicts of a job for OpenTelemetry: OTLP over HTTP, through OpenTelemetry's own SDK.

A span is a step of a rank, a call in it, or a verdict. All spans of one step of the job have one trace, whatever host sends
them. The SDK is optional and imported on use; nothing of it is set for the whole process.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from unickpt.base.errors import ConfigError, StorageError
from unickpt.base.installation import extra_command
from unickpt.diagnosis.detectors.verdicts import Verdict
from unickpt.diagnosis.recording.records import Op, bytes_in
from unickpt.diagnosis.reports.job_records import OP_NAMES, JobRecords, RankRecords
from unickpt.diagnosis.reports.metrics import HELP, MetricValue
from unickpt.diagnosis.reports.verdict_text import VerdictText
from unickpt.diagnosis.snapshot.steps import steps_of

SERVICE, SCOPE = "unickpt", "unickpt.diagnosis"
_AT_ONCE, _TIMEOUT_S = 2048, 10  # spans of one request; its time limit
_TRACE_BYTES = 16

Attributes = Mapping[str, str | int | float]


@dataclass(frozen=True, slots=True)
class TimedSpan:
    """A span.

    Attributes:
        trace: identity of the trace that it belongs to.
        name: what it is.
        begin_ns, end_ns: in nanoseconds since 1970.
        attributes: its attributes.
        error: what is wrong; '' if nothing is.
        inside: the spans inside of it.
    """

    trace: int
    name: str
    begin_ns: int
    end_ns: int
    attributes: Attributes
    error: str = ""
    inside: Sequence[TimedSpan] = field(default_factory=tuple)


def step_spans(job: JobRecords, after: Mapping[int, int] | None = None, *, calls: bool = False) -> Iterator[TimedSpan]:
    """Yield the steps of every rank.

    Args:
        job: the records.
        after: newest step of each rank that was sent before.
        calls: whether steps have their calls inside of them.
    """
    start = min((rank.ring.identity.wall_ns for rank in job.ranks.values() if rank.number == 0), default=0)
    for number, rank in job.ranks.items():
        steps = steps_of(number, rank.records, offset_ns=rank.to_clock_ns)
        for step in steps[steps["number"] > (after or {}).get(number, -1)].tolist():
            _, at, begin_ns, end_ns, own_ns, data_ns, garbage_ns, *_ = step
            trace = _trace(job.name, start, at)
            about: dict[str, str | int | float] = {
                "unickpt.rank": number, "unickpt.step": at, "host.name": rank.ring.identity.host, "unickpt.place": rank.place,
                "unickpt.own_seconds": own_ns / 1e9, "unickpt.waiting_seconds": max(end_ns - begin_ns - own_ns, 0.0) / 1e9,
                "unickpt.data_seconds": data_ns / 1e9, "unickpt.garbage_seconds": garbage_ns / 1e9,
            }  # fmt: skip
            inside = tuple(_calls(job, rank, trace, begin_ns, end_ns)) if calls else ()
            yield TimedSpan(trace, f"step {at}", begin_ns, end_ns, about, inside=inside)


def _calls(job: JobRecords, rank: RankRecords, trace: int, begin_ns: int, end_ns: int) -> Iterator[TimedSpan]:
    records, group = rank.records, rank.group
    called = records["call_ns"] + rank.to_clock_ns
    here = (records["op"] <= Op.RECEIVE) & (records["end_ns"] > 0) & (called >= begin_ns) & (called < end_ns) & (group >= 0)
    sizes = bytes_in(records)
    for at in here.nonzero()[0].tolist():
        op, label = OP_NAMES[int(records["op"][at])], job.groups[int(group[at])].label
        about: dict[str, str | int | float] = {
            "unickpt.rank": rank.number, "unickpt.group": label, "unickpt.seq": int(records["seq"][at]),
            "unickpt.bytes": int(sizes[at]),
        }  # fmt: skip
        yield TimedSpan(trace, f"{op} {label}", int(called[at]), int(records["end_ns"][at]) + rank.to_clock_ns, about)


def verdict_spans(job: JobRecords, verdicts: Sequence[tuple[Verdict, VerdictText]]) -> Iterator[TimedSpan]:
    """Yield a span for each verdict, from its first sign until now, with the status of an error."""
    for verdict, text in verdicts:
        about: dict[str, str | int | float] = {
            "unickpt.syndrome": verdict.syndrome.value, "unickpt.ranks": ",".join(map(str, verdict.ranks)),
            "unickpt.hosts": ",".join(verdict.hosts), "unickpt.line": text.line, "unickpt.next": text.next,
            "unickpt.command": text.command, "unickpt.victims": verdict.victims,
        }  # fmt: skip
        trace = _trace(job.name, verdict.key)
        begin_ns = verdict.since_ns or job.read_ns
        yield TimedSpan(trace, f"verdict: {verdict.syndrome.value}", begin_ns, max(job.read_ns, begin_ns), about, text.sentence)


def _trace(*what: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(what).encode(), digest_size=_TRACE_BYTES).digest(), "big") or 1


# ---------------------------------------------------------------- the SDK


class OtlpSender:
    """Sends spans and metrics to a collector.

    Args:
        endpoint: base of its address, ``http://host:4318``; '' as OpenTelemetry's variables say.
        job: name of the job.
        headers: further headers of each request.

    Raises:
        ConfigError: the SDK is not installed.
    """

    def __init__(self, endpoint: str, job: str, headers: Mapping[str, str] | None = None) -> None:
        base = "opentelemetry.exporter.otlp.proto.http"
        traces, metrics = _imported(f"{base}.trace_exporter"), _imported(f"{base}.metric_exporter")
        self._trace, self._resources = _imported("opentelemetry.sdk.trace"), _imported("opentelemetry.sdk.resources")
        about = {"service.name": SERVICE, "unickpt.job": job}
        self._resource = self._resources.Resource.create(about)
        where = endpoint.rstrip("/")
        more = {"timeout": _TIMEOUT_S, "headers": dict(headers or {}) or None}
        self._where = where or "the collector of OTEL_EXPORTER_OTLP_ENDPOINT"
        self._spans = traces.OTLPSpanExporter(endpoint=f"{where}/v1/traces" if where else None, **more)
        self._metrics = metrics.OTLPMetricExporter(endpoint=f"{where}/v1/metrics" if where else None, **more)
        logging.getLogger(base).setLevel(logging.CRITICAL)  # a failure is an exception here

    def spans(self, spans: Iterator[TimedSpan]) -> int:
        """Send spans, and return their number.

        Raises:
            StorageError: the collector has not taken them.
        """
        made, sent = self._made(), 0
        ids, ended = made
        provider = self._trace.TracerProvider(resource=self._resource, id_generator=ids, shutdown_on_exit=False)
        provider.add_span_processor(ended)
        tracer = provider.get_tracer(SCOPE)
        for span in spans:
            self._put(tracer, ids, span, None)
            if len(ended.found) >= _AT_ONCE:
                sent += self._sent(self._spans, ended.found)
        return sent + (self._sent(self._spans, ended.found) if ended.found else 0)

    def metrics(self, measured: Sequence[MetricValue]) -> int:
        """Send the newest value of each metric, and return the number of values.

        Raises:
            StorageError: the collector has not taken them.
        """
        sdk, export, api = (
            _imported(name)
            for name in ("opentelemetry.sdk.metrics", "opentelemetry.sdk.metrics.export", "opentelemetry.metrics")
        )
        newest: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
        for each in measured:  # ascending steps
            newest.setdefault(each.name, {})[tuple(each.labels.items())] = each.value
        reader = export.InMemoryMetricReader()
        provider = sdk.MeterProvider(metric_readers=[reader], resource=self._resource, shutdown_on_exit=False)
        meter = provider.get_meter(SCOPE)
        for name, series in newest.items():
            make = meter.create_observable_counter if name.endswith("_total") else meter.create_observable_gauge
            found = [api.Observation(value, dict(labels)) for labels, value in series.items()]
            make(name, callbacks=[lambda _, found=found: found], description=HELP[name])
        data = reader.get_metrics_data()
        provider.shutdown()
        if data is None:
            return 0
        self._check(self._metrics.export(data))
        return sum(map(len, newest.values()))

    def _made(self) -> tuple[Any, Any]:
        """Return a generator of identities whose next trace is chosen, and a list of ended spans."""
        generator: Any = _imported("opentelemetry.sdk.trace.id_generator").RandomIdGenerator

        class ChosenTraces(generator):  # type: ignore[misc]
            trace = 0

            def generate_trace_id(self) -> int:
                return self.trace

        class Ended(self._trace.SpanProcessor):  # type: ignore[name-defined,misc]
            def __init__(self) -> None:
                self.found: list[Any] = []

            def on_end(self, span: Any) -> None:
                self.found.append(span)

        return ChosenTraces(), Ended()

    def _put(self, tracer: Any, ids: Any, span: TimedSpan, parent: Any) -> None:
        api, status = _imported("opentelemetry.trace"), _imported("opentelemetry.trace.status")
        ids.trace = span.trace
        context = api.set_span_in_context(parent) if parent is not None else _imported("opentelemetry.context").Context()
        made = tracer.start_span(span.name, context, start_time=span.begin_ns, attributes=dict(span.attributes))
        if span.error:
            made.set_status(status.Status(status.StatusCode.ERROR, span.error))
        for each in span.inside:
            self._put(tracer, ids, each, made)
        made.end(end_time=max(span.end_ns, span.begin_ns))

    def _sent(self, exporter: Any, spans: list[Any]) -> int:
        self._check(exporter.export(tuple(spans)))
        count = len(spans)
        spans.clear()
        return count

    def _check(self, result: Any) -> None:
        if result.name != "SUCCESS":
            raise StorageError(f"{self._where}: the collector has not taken the data; is its OTLP receiver for HTTP there?")


def _imported(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as err:
        raise ConfigError(f"OTLP needs OpenTelemetry: {extra_command('otlp')}") from err
