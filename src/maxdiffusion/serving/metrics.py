"""Prometheus metrics of a server: base units, `_seconds` and `_total`, one registry per server."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

PREFIX = "maxdiffusion"
JOB_SECONDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
STEP_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50)
HTTP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)
MEDIA_TYPE = CONTENT_TYPE_LATEST


class QueueCollector(Collector):
    """Reads the jobs by status when Prometheus asks, so that the numbers are never stale."""

    def __init__(self, counts: Callable[[], Mapping[str, int]]):
        self._counts = counts

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yields the gauge."""
        family = GaugeMetricFamily(f"{PREFIX}_jobs", "Jobs by status.", labels=["status"])
        for status, count in self._counts().items():
            family.add_metric([status], count)
        yield family


class Metrics:
    """All metrics of one server."""

    def __init__(self, counts: Callable[[], Mapping[str, int]]):
        self.registry = CollectorRegistry()
        self.registry.register(QueueCollector(counts))
        ProcessCollector(namespace=PREFIX, registry=self.registry)
        self.ready = Gauge(f"{PREFIX}_ready", "1 once requests are made.", registry=self.registry)
        self.startup = Gauge(
            f"{PREFIX}_startup_seconds",
            "Seconds of a phase of the start.",
            ["phase"],
            registry=self.registry,
        )
        self.finished = Counter(
            f"{PREFIX}_jobs_finished",
            "Jobs that ended, by outcome: completed or the code of the error.",
            ["outcome"],
            registry=self.registry,
        )
        self.refused = Counter(
            f"{PREFIX}_requests_refused",
            "Requests by error code.",
            ["code"],
            registry=self.registry,
        )
        self.waited = self._histogram("queue_wait_seconds", "From request to start.", JOB_SECONDS)
        self.ran = self._histogram("job_seconds", "From start to completion.", JOB_SECONDS)
        self.step = self._histogram("step_seconds", "Seconds of a denoise step.", STEP_SECONDS)
        self.http = Histogram(
            f"{PREFIX}_http_request_seconds",
            "Seconds until the head of an answer.",
            ["route", "status"],
            buckets=HTTP_SECONDS,
            registry=self.registry,
        )
        self.streams = Gauge(
            f"{PREFIX}_event_streams", "Open event streams.", registry=self.registry
        )

    def _histogram(self, name: str, meaning: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"{PREFIX}_{name}", meaning, buckets=buckets, registry=self.registry)

    def text(self) -> bytes:
        """Returns all metrics in Prometheus' format."""
        return generate_latest(self.registry)
