"""From a request to its process: what real processes name in their environment, and who is refused."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from hibernode.discovery.locate import (
    START_SLACK_SECONDS,
    Claim,
    ClaimIndex,
    Contract,
    contract_of,
    locate,
    own_ready_files,
)
from hibernode.discovery.signals import ReadyRequest
from hibernode.errors import RefusedError
from hibernode.workload import ERA_A1
from tests.unit.artifact_kit import ID, OTHER
from tests.unit.hostile import open_descriptors

WAITS = "import os, sys; os.write(1, b'x'); sys.stdin.read()"
EXECS = f"""
import os, sys
os.write(1, b'x')
os.read(0, 1)
os.execve(sys.executable, [sys.executable, "-c", {WAITS!r}], {{**os.environ, **eval(sys.argv[1])}})
"""
FORKS = """
import os, sys
fds = os.pipe()
if os.fork() == 0:
    if os.fork() == 0:
        os.write(fds[1], b"x")
        sys.stdin.read()
        os._exit(0)
    os.wait()
    os._exit(0)
os.read(fds[0], 1)
os.write(1, b"x")
os.wait()
"""


@pytest.mark.parametrize(
    ("environ", "contract"),
    [
        pytest.param({}, Contract(), id="an environment without the contract's names"),
        pytest.param({"DYN_CHECKPOINT_READY_FILE": "/r"}, Contract(), id="a ready file alone"),
        pytest.param(
            {"DYN_CHECKPOINT_HASH": ID},
            Contract("A1", "", "/tmp/checkpoint-ready", "/tmp/dynamo-restored"),
            id="an id alone: the era's default files",
        ),
        pytest.param(
            {"DYN_CHECKPOINT_SIGNAL_FILE": "/s/x.done", "DYN_CHECKPOINT_READY_FILE": ""},
            Contract("A1", "/s/x.done", "/tmp/checkpoint-ready", "/tmp/dynamo-restored"),
            id="a signal file, and an empty ready file",
        ),
        pytest.param(
            {
                "DYN_CHECKPOINT_HASH": ID,
                "DYN_CHECKPOINT_SIGNAL_FILE": "/s/x.done",
                "DYN_CHECKPOINT_READY_FILE": "/r",
                "DYN_RESTORE_MARKER_FILE": "/m",
                "OTHER": "1",
            },
            Contract("A1", "/s/x.done", "/r", "/m"),
            id="every name",
        ),
    ],
)
def test_the_contract_is_read_from_the_environment(environ: Mapping[str, str], contract: Contract) -> None:
    """Names that are not given have the era's defaults once the process names an id or a signal file."""
    assert contract_of(environ, ERA_A1) == contract


@pytest.fixture
def signal_dir(tmp_path: Path) -> Path:
    """Make a signal directory."""
    path = tmp_path / "signals"
    path.mkdir()
    return path


@pytest.fixture
def index(signal_dir: Path) -> ClaimIndex:
    """Make an index of the signal directory's claims."""
    return ClaimIndex(ERA_A1, signal_dir)


def named(signal_dir: Path, id_: str = ID, **more: str) -> dict[str, str]:
    """Build a worker's environment."""
    return {
        "DYN_CHECKPOINT_HASH": id_,
        "DYN_CHECKPOINT_SIGNAL_FILE": str(signal_dir / f"{id_}.done"),
        **more,
    }


@contextlib.contextmanager
def worker(
    env: Mapping[str, str], script: str = WAITS, *args: str, uid: int | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process with exactly this environment until the block ends."""
    python = [sys.executable, "-c", script, *args]
    with subprocess.Popen(
        python if uid is None else ["/bin/sh", "-c", "printf x; read line"],  # ours may be out of its reach
        env=dict(env),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        user=uid,
        cwd="/",
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read(1) == b"x"
        yield process
        process.communicate()


def claims_of(index: ClaimIndex, id_: str = ID) -> list[Claim]:
    """Look at every process and list the claims on ``id_``."""
    index.refresh()
    return [claim for claim in index.claims() if claim.hash == id_]


def request(pid: int | None = None, *, uid: int | None = None, age: float = 0.0) -> ReadyRequest:
    """Build a ready file that was written ``age`` seconds ago."""
    uid = os.getuid() if uid is None else uid
    return ReadyRequest(ID, pid, uid, uid, time.time() - age, (1, 2, 3))


def refusal(request: ReadyRequest, index: ClaimIndex) -> RefusedError:
    """Locate a request that must be refused; no descriptor may be left over."""
    before = open_descriptors()
    with pytest.raises(RefusedError) as caught:
        locate(request, index, ERA_A1)
    assert open_descriptors() == before
    assert caught.value.remedy
    return caught.value


def test_a_worker_claims_the_id_that_it_names(signal_dir: Path, index: ClaimIndex) -> None:
    """A process that names an id and this directory is found and held, with its contract."""
    with worker(named(signal_dir, DYN_RESTORE_MARKER_FILE="/m")) as process:
        (claim,) = claims_of(index)
        assert (claim.key.pid, claim.hash) == (process.pid, ID)
        located = locate(request(), index, ERA_A1)
        with located.process as held:
            assert held.key == claim.key
            assert located.contract == claim.contract
            assert located.contract.restore_marker == "/m"
    assert claims_of(index) == []


@pytest.mark.parametrize(
    "env",
    [
        pytest.param({}, id="nothing"),
        pytest.param({"DYN_CHECKPOINT_HASH": ID}, id="no signal file"),
        pytest.param({"DYN_CHECKPOINT_SIGNAL_FILE": "{dir}/" + ID + ".done"}, id="no id"),
        pytest.param(
            {"DYN_CHECKPOINT_HASH": ID, "DYN_CHECKPOINT_SIGNAL_FILE": "{dir}/" + OTHER + ".done"},
            id="another id's signal file",
        ),
        pytest.param(
            {"DYN_CHECKPOINT_HASH": ID, "DYN_CHECKPOINT_SIGNAL_FILE": "{dir}/../" + ID + ".done"},
            id="another directory",
        ),
        pytest.param(
            {"DYN_CHECKPOINT_HASH": ID, "DYN_CHECKPOINT_SIGNAL_FILE": "/no/such/place/" + ID + ".done"},
            id="a directory that is not there",
        ),
        pytest.param(
            {"DYN_CHECKPOINT_HASH": ID, "DYN_CHECKPOINT_SIGNAL_FILE": ID + ".done"}, id="a relative path"
        ),
        pytest.param(
            {"DYN_CHECKPOINT_HASH": ID, "DYN_CHECKPOINT_SIGNAL_FILE": "/" + "x" * 5000 + "/" + ID + ".done"},
            id="a path that is too long",
        ),
    ],
)
def test_who_does_not_name_id_and_directory_is_no_claimant(
    signal_dir: Path, index: ClaimIndex, env: dict[str, str]
) -> None:
    """A process whose environment does not name this id in this directory is not found."""
    with worker({name: value.replace("{dir}", str(signal_dir)) for name, value in env.items()}):
        assert claims_of(index) == []
        assert refusal(request(), index).reason == "NoClaimant"


def test_the_directory_is_known_under_another_path(
    signal_dir: Path, index: ClaimIndex, tmp_path: Path
) -> None:
    """Directories are compared by device and inode, so another path to the same one will do."""
    (tmp_path / "other").symlink_to(signal_dir)
    with worker(named(tmp_path / "other")) as process:
        assert [claim.key.pid for claim in claims_of(index)] == [process.pid]


def test_a_directory_of_the_same_name_elsewhere_is_another(
    signal_dir: Path, index: ClaimIndex, tmp_path: Path
) -> None:
    """The same path to another directory does not make a claim."""
    with worker(named(signal_dir)):
        assert len(claims_of(index)) == 1
        signal_dir.rename(tmp_path / "old")
        assert claims_of(index) == []
        signal_dir.mkdir()
        assert len(claims_of(index)) == 1


def test_an_exec_after_the_first_look_is_seen(signal_dir: Path, index: ClaimIndex) -> None:
    """A process that gets its names by an exec is found under the pid and start time it had before."""
    with worker({}, EXECS, repr(named(signal_dir))) as process:
        assert claims_of(index) == []
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"x")
        process.stdin.flush()
        assert process.stdout.read(1) == b"x"
        assert [claim.key.pid for claim in claims_of(index)] == [process.pid]


def test_an_exec_can_take_the_claim_away(signal_dir: Path, index: ClaimIndex) -> None:
    """A process that loses its names by an exec is not found any more."""
    with worker(named(signal_dir), EXECS, repr({"DYN_CHECKPOINT_HASH": OTHER})) as process:
        assert len(claims_of(index)) == 1
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"x")
        process.stdin.flush()
        assert process.stdout.read(1) == b"x"
        assert claims_of(index) == []


def test_the_topmost_of_a_tree_is_the_claimant(signal_dir: Path, index: ClaimIndex) -> None:
    """Children and grandchildren inherit the environment; only the topmost claims."""
    with worker(named(signal_dir), FORKS) as process:
        assert [claim.key.pid for claim in claims_of(index)] == [process.pid]
        with locate(request(), index, ERA_A1).process as held:
            assert held.pid == process.pid


def test_two_claimants_are_refused(signal_dir: Path, index: ClaimIndex) -> None:
    """Two separate processes that name one id are refused, and both are named."""
    with worker(named(signal_dir)) as one, worker(named(signal_dir)) as two:
        index.refresh()
        error = refusal(request(), index)
        assert error.reason == "TwoClaimants"
        assert error.fields["pids"] == f"{min(one.pid, two.pid)}, {max(one.pid, two.pid)}"
        with locate(request(two.pid), index, ERA_A1).process as held:
            assert held.pid == two.pid


def test_workers_of_two_ids_do_not_meet(signal_dir: Path, index: ClaimIndex) -> None:
    """Each id has its own claimant."""
    with worker(named(signal_dir)) as one, worker(named(signal_dir, OTHER)) as two:
        index.refresh()
        assert {claim.hash: claim.key.pid for claim in index.claims()} == {ID: one.pid, OTHER: two.pid}


def test_a_claimant_that_has_ended_since_is_gone(signal_dir: Path, index: ClaimIndex) -> None:
    """A process that ends between the look and the hold is refused as gone."""
    with worker(named(signal_dir)):
        index.refresh()
    assert refusal(request(), index).reason == "WorkerGone"


def test_a_file_that_names_a_pid_needs_no_environment(index: ClaimIndex) -> None:
    """A ready file may name its writer's pid; the contract is then empty."""
    with worker({}) as process:
        located = locate(request(process.pid), index, ERA_A1)
        with located.process as held:
            assert (held.pid, located.contract) == (process.pid, Contract())


def test_a_pid_of_another_id_is_refused(signal_dir: Path, index: ClaimIndex) -> None:
    """A ready file must not name the worker of another id."""
    with worker(named(signal_dir, OTHER)) as process:
        assert refusal(request(process.pid), index).reason == "WrongId"


def test_a_pid_that_has_ended_is_refused(index: ClaimIndex) -> None:
    """A ready file that names nobody is refused."""
    with worker({}) as process:
        pass
    assert refusal(request(process.pid), index).reason == "WorkerGone"


@pytest.mark.parametrize(
    ("uid", "age", "reason"),
    [
        pytest.param(12345, 0.0, "WrongOwner", id="another user's file"),
        pytest.param(None, 60.0 + START_SLACK_SECONDS, "StaleReadyFile", id="a file older than the process"),
    ],
)
def test_the_file_must_be_the_worker_s_own(
    signal_dir: Path, index: ClaimIndex, uid: int | None, age: float, reason: str
) -> None:
    """The ready file must be its worker's by owner and by age, whether it names a pid or not."""
    with worker(named(signal_dir)) as process:
        index.refresh()
        for pid in (process.pid, None):
            error = refusal(request(pid, uid=uid, age=age), index)
            assert (error.reason, error.fields["pid"]) == (reason, process.pid)


def test_a_worker_of_another_user_may_ask_for_itself(signal_dir: Path, index: ClaimIndex) -> None:
    """A file and a process of the same unprivileged user fit."""
    signal_dir.chmod(0o1777)
    with worker(named(signal_dir), uid=65534) as process:
        index.refresh()
        with locate(request(uid=65534), index, ERA_A1).process as held:
            assert held.pid == process.pid
        assert refusal(request(uid=0), index).reason == "WrongOwner"


def test_a_worker_s_own_ready_file_is_a_request(signal_dir: Path, index: ClaimIndex, tmp_path: Path) -> None:
    """A ready file inside the worker's root is taken when it is plainly the worker's own."""
    ready = tmp_path / "ready"
    with worker(named(signal_dir, DYN_CHECKPOINT_READY_FILE=str(ready))) as process:
        claims = claims_of(index)
        assert own_ready_files(claims) == []
        ready.write_text("")
        (found,) = own_ready_files(claims)
        assert (found.id, found.pid, found.uid) == (ID, process.pid, os.getuid())
        assert found.identity == (ready.stat().st_dev, ready.stat().st_ino, ready.stat().st_ctime_ns)
        os.link(ready, tmp_path / "second name")
        assert own_ready_files(claims) == []
        (tmp_path / "second name").unlink()
        assert len(own_ready_files(claims)) == 1
        os.chown(ready, 12345, 12345)
        assert own_ready_files(claims) == []


def test_a_ready_file_of_an_earlier_worker_is_none(
    signal_dir: Path, index: ClaimIndex, tmp_path: Path
) -> None:
    """A claim whose process began after the file was written, or has ended, is no request."""
    ready = tmp_path / "ready"
    ready.write_text("")
    with worker(named(signal_dir, DYN_CHECKPOINT_READY_FILE=str(ready))):
        (claim,) = claims_of(index)
        assert len(own_ready_files([claim])) == 1
        ticks = claim.key.start_ticks + 3600 * os.sysconf("SC_CLK_TCK")
        younger = Claim(type(claim.key)(claim.key.pid, ticks), claim.hash, claim.contract)
        assert own_ready_files([younger]) == []
        bad = Claim(claim.key, "../../etc/x", claim.contract)
        assert own_ready_files([bad]) == []
    assert own_ready_files([claim]) == []


@pytest.mark.parametrize(
    ("environ", "ready_file"),
    [
        ({}, "/tmp/checkpoint-ready"),
        ({"DYN_CHECKPOINT_READY_FILE": "/a"}, "/a"),
        ({"DYN_READY_FOR_CHECKPOINT_FILE": "/b"}, "/b"),
        ({"DYN_SNAPSHOT_CONTROL_DIR": "/snapshot-control/"}, "/snapshot-control/ready-for-checkpoint"),
        ({"DYN_CHECKPOINT_READY_FILE": "/a", "DYN_READY_FOR_CHECKPOINT_FILE": "/b"}, "/a"),
        ({"DYN_CHECKPOINT_READY_FILE": "", "DYN_READY_FOR_CHECKPOINT_FILE": "/b"}, "/b"),
    ],
)
def test_the_ready_file_has_the_name_that_its_era_gives_it(environ, ready_file):
    """The era's own name first, then those of later eras, then the era's default path."""
    assert contract_of({"DYN_CHECKPOINT_HASH": "x", **environ}, ERA_A1).ready_file == ready_file


def test_a_pods_label_wins_over_environments(signal_dir: Path, index: ClaimIndex) -> None:
    """Over its own worker's, and over others who claim the id that the label gives."""
    third = "0" * 12
    with (
        worker(named(signal_dir)) as labelled,
        worker(named(signal_dir, OTHER)) as thief,
        worker(named(signal_dir, third)) as free,
    ):
        index.label_of = lambda pid: OTHER if pid == labelled.pid else None
        index.refresh()
        claims = {claim.key.pid: claim.hash for claim in index.claims()}
        assert claims[labelled.pid] == OTHER
        assert thief.pid not in claims
        assert claims[free.pid] == third
