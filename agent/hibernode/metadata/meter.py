"""What the service counts; labels are methods and results, nothing that a caller can choose."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram

BUCKETS: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
"""Seconds: answers from memory take under a millisecond, a worker that is asked up to some seconds."""


class Meter:
    """Counters in the agent's registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "hibernode_metadata_requests_total",
            "Requests to the metadata service that have ended.",
            ["method", "result"],
            registry=registry,
        )
        self._seconds = Histogram(
            "hibernode_metadata_request_seconds",
            "Seconds that a request to the metadata service took.",
            ["method"],
            buckets=BUCKETS,
            registry=registry,
        )
        self._bytes = Counter(
            "hibernode_metadata_bytes_total",
            "Bytes of messages of the metadata service.",
            ["direction"],
            registry=registry,
        )

    def ended(self, method: str, result: str, seconds: float) -> None:
        """Count a request; ``result`` is ``ok``, ``rejected`` (success=false) or a gRPC code's name."""
        self._requests.labels(method, result).inc()
        self._seconds.labels(method).observe(seconds)

    def carried(self, received: int, sent: int) -> None:
        """Count bytes."""
        self._bytes.labels("in").inc(received)
        self._bytes.labels("out").inc(sent)
