"""The gate that every checkpoint id passes, and the names of era A1."""

from __future__ import annotations

import dataclasses
import string
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hibernode.errors import UsageError
from hibernode.workload import ERA_A1, CheckpointId, Finding, ProcessKey, Verdict


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("96429b272576", id="twelve digits, as eras A0 and early A1 cut the hash"),
        pytest.param("0123456789abcdef", id="sixteen digits, as later eras do"),
        pytest.param("000000000000", id="all zeros"),
    ],
)
def test_an_id_passes_the_gate_unchanged(text: str) -> None:
    """What passes is a plain string that is equal to the text."""
    id_ = CheckpointId(text)
    assert id_ == text
    assert isinstance(id_, str)
    assert CheckpointId(id_) == id_


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="nothing"),
        pytest.param("96429b27257", id="eleven digits"),
        pytest.param("96429b2725761", id="thirteen digits"),
        pytest.param("0123456789abcdef0", id="seventeen digits"),
        pytest.param("96429B272576", id="upper case"),
        pytest.param("96429b27257g", id="no hexadecimal digit"),
        pytest.param("../../etc/pas", id="a way out of the store"),
        pytest.param("96429b/72576", id="a separator in the middle"),
        pytest.param("96429b.72576", id="a dot in the middle"),
        pytest.param("............", id="twelve dots"),
        pytest.param("96429b272576\n", id="a newline after an id"),
        pytest.param("\n96429b272576", id="a newline before an id"),
        pytest.param(" 96429b272576", id="a blank before an id"),
        pytest.param("96429b27257\0", id="a NUL at the end"),
        pytest.param("96429b27257\u0663", id="an Arabic digit"),
        pytest.param("96429b27257\uff11", id="a full-width digit"),
        pytest.param("96429b27257\u0430", id="a Cyrillic look-alike"),
        pytest.param("96429b27257\udcff", id="a byte that is not UTF-8"),
        pytest.param("96429b272576 0123456789abcdef", id="two ids"),
        pytest.param("a" * 100_000, id="a very long text"),
    ],
)
def test_the_gate_refuses_what_is_no_id(text: str) -> None:
    """FC-37: anything but 12 or 16 lower-case hexadecimal digits is a usage error with a short message."""
    with pytest.raises(UsageError) as caught:
        CheckpointId(text)
    assert caught.value.reason == "InvalidCheckpointId"
    assert caught.value.exit_code == 2
    assert caught.value.remedy
    assert len(caught.value.message) < 400
    assert caught.value.message.isprintable()


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(None, id="None"),
        pytest.param(964292725761, id="a number of twelve digits"),
        pytest.param(b"96429b272576", id="bytes"),
        pytest.param(["96429b272576"], id="a list"),
    ],
)
def test_the_gate_refuses_what_is_no_text(value: object) -> None:
    """FC-37: a value of another type is a usage error and no TypeError."""
    with pytest.raises(UsageError):
        CheckpointId(cast("Any", value))


@given(st.text(max_size=20))
def test_whatever_passes_can_be_a_file_name(text: str) -> None:
    """FC-37: a text passes exactly when it is 12 or 16 characters of 0-9a-f."""
    is_id = len(text) in (12, 16) and set(text) <= set(string.digits + "abcdef")
    try:
        CheckpointId(text)
    except UsageError:
        assert not is_id
    else:
        assert is_id


def test_era_a1_has_the_contract_s_names() -> None:
    """Era A1's constants are those of the contract, suffixes included."""
    assert ERA_A1.env_hash == "DYN_CHECKPOINT_HASH"
    assert ERA_A1.env_signal_file == "DYN_CHECKPOINT_SIGNAL_FILE"
    assert ERA_A1.env_ready_file == "DYN_CHECKPOINT_READY_FILE"
    assert ERA_A1.env_restore_marker == "DYN_RESTORE_MARKER_FILE"
    assert ERA_A1.signal_dir == "/var/lib/dynamo-checkpoint/signals"
    assert (ERA_A1.ready_suffix, ERA_A1.done_suffix) == (".ready", ".done")
    assert (ERA_A1.restore_suffix, ERA_A1.restored_suffix) == (".restore", ".restored")
    assert ERA_A1.done_in_artifact == "checkpoint.done"


@pytest.mark.parametrize(
    ("thing", "field"),
    [
        pytest.param(ERA_A1, "env_hash", id="an era"),
        pytest.param(Finding("a", Verdict.OK), "verdict", id="a finding"),
        pytest.param(ProcessKey(1, 2), "pid", id="a process key"),
    ],
)
def test_the_nouns_cannot_be_changed(thing: object, field: str) -> None:
    """The shared nouns are frozen."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(thing, field, "other")
