"""Metrics: the exposition parses, the names follow the practice, labels are bounded."""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass, field

import pytest
from prometheus_client.parser import text_string_to_metric_families

from hibernode.metrics import COLLECT_SECONDS, FAMILIES, MAX_WORDS, Metrics, Words

NAMES = {
    "hibernode_build_info",
    "hibernode_checkpoints",
    "hibernode_checkpoint_phase_seconds",
    "hibernode_checkpoint_bytes",
    "hibernode_restores",
    "hibernode_restore_phase_seconds",
    "hibernode_jobs_in_progress",
    "hibernode_queue_depth",
    "hibernode_watch_overflows",
    "hibernode_watch_rescans",
    "hibernode_watch_mode_info",
    "hibernode_store_bytes",
    "hibernode_store_free_bytes",
    "hibernode_store_artifacts",
    "hibernode_gc_removed",
    "hibernode_signal_rejected",
    "hibernode_restored_workers",
    "hibernode_collector_duration_seconds",
    "hibernode_collector_success",
    "process_start_time_seconds",
    "process_resident_memory_bytes",
    "process_cpu_seconds",
}


@dataclass(frozen=True)
class Outcome:
    success: bool
    reason: str
    exit_code: int = 0
    phases: dict[str, float] = field(default_factory=dict)
    bytes: int = 0
    reused: bool = False


def everything() -> Metrics:
    """Metrics in which each family has a sample."""
    metrics = Metrics()
    metrics.checkpoint(Outcome(True, "Captured", phases={"criu": 1.5, "quiesce-gpu": 0.1}, bytes=1 << 30))
    metrics.restore(Outcome(False, "CriuFailed", 1, {"verify": 0.2}))
    metrics.rejected("NoClaimant")
    metrics.gc_removed("Age")
    metrics.add_collector(
        "all",
        lambda: {name: {"some": 1.0} if family.label else 2.0 for name, family in FAMILIES.items()},
    )
    return metrics


async def families(metrics: Metrics):
    text = (await metrics.render()).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


async def value(metrics: Metrics, name: str, **labels: str):
    for family in (await families(metrics)).values():
        for sample in family.samples:
            if sample.name == name and sample.labels == labels:
                return sample.value
    return None


async def test_every_family_is_there_and_parses():
    """The exposition holds the names of the contract, each with a help text and a sample."""
    found = await families(everything())
    assert found.keys() >= NAMES
    assert not {name for name in found if not name.startswith(("hibernode_", "process_"))}
    for name in NAMES:
        assert found[name].documentation.endswith(".")
        assert found[name].samples


async def test_names_follow_the_naming_practice():
    """Counters end in _total, times are seconds, sizes are bytes, and info metrics are one."""
    for family in (await families(everything())).values():
        assert re.fullmatch(r"[a-z][a-z0-9_]*", family.name)
        assert not re.search(r"_(ms|milliseconds|minutes|kb|mb|kib|mib|percent|count)$", family.name)
        plain = {sample.name for sample in family.samples}
        if family.type == "counter":
            assert plain <= {f"{family.name}_total", f"{family.name}_created"}
        elif family.type == "gauge":
            assert not any(name.endswith("_total") for name in plain)
        if family.name.endswith("_info"):
            assert all(sample.value == 1 for sample in family.samples)


@pytest.mark.parametrize(
    ("outcome", "result"),
    [
        pytest.param(Outcome(True, "Captured"), "success", id="done"),
        pytest.param(Outcome(False, "IoUringInUse", 4), "refused", id="refused before anything was touched"),
        pytest.param(Outcome(False, "CriuFailed", 1), "failure", id="failed"),
        pytest.param(Outcome(False, "NoSpace", 5), "failure", id="no space"),
    ],
)
async def test_an_outcome_is_counted_by_result_and_reason(outcome, result):
    """Checkpoints and restores are told apart by what happened and why."""
    metrics = Metrics()
    metrics.checkpoint(outcome)
    metrics.restore(outcome)
    metrics.restore(outcome)
    assert await value(metrics, "hibernode_checkpoints_total", result=result, reason=outcome.reason) == 1
    assert await value(metrics, "hibernode_restores_total", result=result, reason=outcome.reason) == 2


async def test_sizes_count_new_artifacts_only():
    """A request that an existing artifact answers adds no bytes, nor does a failure."""
    metrics = Metrics()
    metrics.checkpoint(Outcome(True, "Captured", bytes=100))
    metrics.checkpoint(Outcome(True, "AlreadyCaptured", bytes=100, reused=True))
    metrics.checkpoint(Outcome(False, "CriuFailed", 1))
    assert await value(metrics, "hibernode_checkpoint_bytes_count") == 1
    assert await value(metrics, "hibernode_checkpoint_bytes_sum") == 100


async def test_a_success_is_at_zero_before_the_first_one():
    """A rate over successes exists from the start."""
    assert await value(Metrics(), "hibernode_checkpoints_total", result="success", reason="Captured") == 0


def test_label_values_are_words_and_bounded():
    """What is no word, and every word after the last that fits, is Other."""
    words = Words(3)
    assert [words.fit(word) for word in ("A", "", "../x", "a b", "é", "X" * 65, "B", "C", "D", "A")] == [
        *("A", "Other", "Other", "Other", "Other", "Other", "B", "C", "Other", "A")
    ]


async def test_a_flood_of_reasons_cannot_grow_the_exposition():
    """Ten thousand reasons make a bounded number of series."""
    metrics = Metrics()
    for number in range(10_000):
        metrics.rejected(f"Reason{number}")
    found = (await families(metrics))["hibernode_signal_rejected"]
    assert len([sample for sample in found.samples if sample.name.endswith("_total")]) <= MAX_WORDS + 1
    rest = await value(metrics, "hibernode_signal_rejected_total", reason="Other")
    assert rest is not None
    assert rest >= 10_000 - MAX_WORDS


async def test_a_collector_that_fails_tells_so_and_leaves_its_families_out():
    """The scrape is answered; what could not be read is absent rather than stale."""
    metrics = Metrics()
    readings = [{"hibernode_queue_depth": 3.0}]
    metrics.add_collector("jobs", lambda: readings[0])
    metrics.add_collector("odd", lambda: {"hibernode_no_such": 1.0})
    assert await value(metrics, "hibernode_queue_depth") == 3
    assert await value(metrics, "hibernode_collector_success", collector="jobs") == 1
    assert await value(metrics, "hibernode_collector_success", collector="odd") == 0
    readings.clear()
    assert await value(metrics, "hibernode_queue_depth") is None
    assert await value(metrics, "hibernode_collector_success", collector="jobs") == 0
    assert await value(metrics, "hibernode_collector_duration_seconds", collector="jobs") is not None


async def test_a_hung_collector_costs_its_deadline_and_one_thread():
    """A file system that hangs is reported, and not asked again while it hangs."""
    metrics = Metrics()
    started: list[int] = []
    release = threading.Event()

    def hang() -> dict[str, float]:
        started.append(1)
        release.wait(60)
        return {"hibernode_store_free_bytes": 1.0}

    metrics.add_collector("store", hang, blocking=True)
    metrics.add_collector("jobs", lambda: {"hibernode_queue_depth": 1.0})
    try:
        for _ in range(3):
            assert await value(metrics, "hibernode_collector_success", collector="store") == 0
        assert await value(metrics, "hibernode_queue_depth") == 1
        duration = await value(metrics, "hibernode_collector_duration_seconds", collector="store")
        assert duration is not None
        assert duration >= COLLECT_SECONDS
        assert started == [1]
    finally:
        release.set()
        metrics.close()


async def test_a_reading_is_kept_for_as_long_as_it_was_said():
    """A store that takes long to look at is not looked at for every scrape."""
    metrics = Metrics()
    reads: list[int] = []

    def read() -> dict[str, float]:
        reads.append(1)
        return {"hibernode_queue_depth": float(len(reads))}

    metrics.add_collector("kept", read, keep_seconds=3600)
    assert [await value(metrics, "hibernode_queue_depth") for _ in range(3)] == [1, 1, 1]


def test_collectors_have_names_of_their_own():
    """A name stands for one collector."""
    metrics = Metrics()
    metrics.add_collector("one", dict)
    with pytest.raises(ValueError, match="one"):
        metrics.add_collector("one", dict)


def test_two_sets_of_metrics_do_not_meet():
    """The registry is our own, so a second agent in one process is no clash."""
    assert Metrics().registry is not Metrics().registry
