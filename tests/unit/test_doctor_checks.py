"""The checks of ``hibernode doctor`` that need no machine of a special kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hibernode.preflight import host_checks
from hibernode.settings import Settings, SignalSettings
from hibernode.workload import Verdict

if TYPE_CHECKING:
    from pathlib import Path

FAIL, WARN, OK, SKIP = Verdict.FAIL, Verdict.WARN, Verdict.OK, Verdict.SKIP


@pytest.mark.parametrize(
    ("release", "verdict"),
    [("6.18.44-x", OK), ("5.12.0", OK), ("5.11.22-gke", FAIL), ("4.18.0-553.el8", FAIL)],
)
def test_kernel(release: str, verdict: Verdict) -> None:
    """A kernel is judged by its first two numbers."""
    assert host_checks.check_kernel(release).verdict is verdict


ALL_CAPABILITIES = (1 << 41) - 1


@pytest.mark.parametrize(
    ("effective", "verdict", "word"),
    [
        pytest.param(ALL_CAPABILITIES, OK, "all", id="all are there"),
        pytest.param(
            ALL_CAPABILITIES & ~(1 << 24), WARN, "CAP_SYS_RESOURCE", id="CAP_SYS_RESOURCE is a warning"
        ),
        pytest.param(ALL_CAPABILITIES & ~(1 << 40), FAIL, "CAP_CHECKPOINT_RESTORE", id="a needed one fails"),
        pytest.param(0, FAIL, "CAP_SYS_ADMIN", id="none fails"),
    ],
)
def test_capabilities(effective: int, verdict: Verdict, word: str) -> None:
    """Missing capabilities are named."""
    finding = host_checks.check_capabilities(effective)
    assert finding.verdict is verdict
    assert word in finding.found


def test_the_profile_is_skipped_where_no_kubelet_is(tmp_path: Path) -> None:
    """Without a kubelet directory there is no profile to compare."""
    assert host_checks.check_profile(b"{}", tmp_path / "none").verdict is SKIP


@pytest.mark.parametrize(
    ("content", "verdict", "word"),
    [(b"{}", OK, "same"), (b"{ }", WARN, "differs"), (None, WARN, "No such file")],
    ids=["equal", "different", "absent"],
)
def test_the_profile_of_the_kubelet(
    tmp_path: Path, content: bytes | None, verdict: Verdict, word: str
) -> None:
    """The installed profile must be the shipped one, byte for byte."""
    if content is not None:
        path = tmp_path / host_checks.PROFILE
        path.parent.mkdir(parents=True)
        path.write_bytes(content)
    finding = host_checks.check_profile(b"{}", tmp_path)
    assert finding.verdict is verdict
    assert word in finding.found


@pytest.mark.parametrize(
    ("mode", "verdict"),
    [(0o755, OK), (0o1777, OK), (0o777, WARN)],
    ids=["private", "sticky", "everybody may remove everything"],
)
def test_the_signal_directory_is_sticky(tmp_path: Path, mode: int, verdict: Verdict) -> None:
    """A signal directory where everybody may write must be sticky."""
    tmp_path.chmod(mode)
    assert host_checks.check_signals(tmp_path).verdict is verdict


def test_a_signal_directory_that_is_a_link_fails(tmp_path: Path) -> None:
    """A link in place of the signal directory is not followed."""
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    assert host_checks.check_signals(link).verdict is FAIL


def test_own_paths_that_others_may_write_fail(tmp_path: Path) -> None:
    """A state directory where others may write is named."""
    tmp_path.chmod(0o777)
    settings = Settings(state_dir=tmp_path, signals=SignalSettings(path=tmp_path))
    finding = host_checks.check_own_paths(settings)
    assert finding.verdict is FAIL
    assert str(tmp_path) in finding.found
