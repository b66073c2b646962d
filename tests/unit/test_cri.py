"""The CRI client against a server on a real socket, honest and not; the codec; the comparison with /proc."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hibernode import cri_checks
from hibernode.cri_checks import Compared, check_containers, compare, cri_findings, judge
from hibernode.discovery.container_ref import parse_path
from hibernode.discovery.containers import Container
from hibernode.host import cri
from hibernode.host.cri import Cri, CriCallError, CriNode
from hibernode.host.protobuf import Table, decode, encode
from hibernode.workload import Finding, ProcessKey, Verdict
from tests.unit.cri_kit import ANSWERS, FakeCri, told

A, B, C = ("a" * 64, "b" * 64, "c" * 64)
POD = "01234567-89ab-cdef-0123-456789abcdef"
OTHER_POD = "11234567-89ab-cdef-0123-456789abcdef"
NOBODY = cri.MAX_PID - 1
"""A pid that no process has: the kernel gives the highest ones last."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Give a place for a socket, with characters that mean something in an address."""
    folder = tmp_path / "a b%20?#"
    folder.mkdir()
    return folder / "cri.sock"


def refused(server: FakeCri, *, call_seconds: float = 30.0, total_seconds: float = 60.0) -> CriCallError:
    """Ask for all there is and return the error."""
    asked = Cri(server.socket, call_seconds=call_seconds, total_seconds=total_seconds)

    def ask() -> None:
        asked.version()
        asked.node()

    with asked, pytest.raises(CriCallError) as raised:
        ask()
    error = raised.value
    assert error.remedy
    assert error.message.isprintable()
    assert len(error.message) < 600
    return error


def container(path: str, pid: int, comm: str = "python3", depth: int = 2) -> Container:
    """Describe a container as /proc shows it."""
    return Container(parse_path(path), ProcessKey(pid, 1), comm, 4026530000 + pid, depth)


def in_pod(id_: str, pid: int, pod: str = POD, comm: str = "python3") -> Container:
    """Describe a container of a pod, below the agent's own containers if it has any."""
    return container(f"/kubepods/burstable/pod{pod}/{id_}", pid, comm)


# the client ---------------------------------------------------------------------------------------------


def test_containers_come_with_name_pod_state_and_pid(path: Path) -> None:
    """Only running ones are asked for their pid."""
    containers = [
        told(A, 4711, pod_uid=POD),
        told(B, 0, "sidecar", POD, "exited"),
        told(C, 0, "next", state="created"),
    ]
    with FakeCri(path, *containers) as server, Cri(path) as asked:
        assert asked.version() == ("fake", "v1.2")
        assert asked.node() == CriNode(tuple(containers), frozenset({POD}))
        assert server.asked == ["Version", "ListPodSandbox", "ListContainers", "ContainerStatus"]


def test_one_that_ends_between_two_questions_has_exited(path: Path) -> None:
    """The runtime no longer knows it."""
    with FakeCri(path, told(A, 5), ContainerStatus=grpc.StatusCode.NOT_FOUND), Cri(path) as asked:
        assert asked.node().containers == (told(A, 0, state="exited"),)


def test_a_runtime_that_does_not_tell_the_pid_is_no_error(path: Path) -> None:
    """The dockerd shim gives no such information."""
    status = encode(ANSWERS["ContainerStatus"], {"status": {"id": A, "state": 1}})
    with FakeCri(path, told(A, 0), ContainerStatus=status), Cri(path) as asked:
        assert asked.node().containers == (told(A, 0),)


def test_a_large_node_fits(path: Path) -> None:
    """A thousand containers with the labels that the kubelet gives."""
    listed: Table = {"id": (1, str), "state": (6, int), "labels": (8, [str])}
    table: Table = {"containers": (1, [listed])}
    every = [{"id": f"{n:064x}", "state": 2, "labels": ["x" * 200] * 8} for n in range(1000)]
    with FakeCri(path, ListContainers=encode(table, {"containers": every})), Cri(path) as asked:
        assert len(asked.node().containers) == 1000


def listing(id_: str) -> bytes:
    """Encode an answer that lists one running container."""
    return encode(ANSWERS["ListContainers"], {"containers": [{"id": id_, "state": 1}]})


@pytest.mark.parametrize(
    ("method", "answer"),
    [
        pytest.param("ListContainers", b"\xff" * 30, id="no message"),
        pytest.param("ListContainers", b"\x0a\x7f\x01", id="cut in the middle"),
        pytest.param("ListContainers", listing("../../etc"), id="an id with a path"),
        pytest.param("ListContainers", listing("\x1b[2J" * 50), id="an id of escapes"),
        pytest.param("ListContainers", b"\x0a\x00", id="no id"),
        pytest.param("ListPodSandbox", b"\x0a\x00", id="a sandbox without an id"),
        pytest.param("ListContainers", b"\x0a\x04\x0a\x02\xff\xfe", id="text that is no UTF-8"),
        pytest.param("ListContainers", b"\x0a\x02\x08\x01", id="a number for a text"),
        pytest.param("ListContainers", b"\x0a\x00" * (1 << 19), id="too many"),
        pytest.param(
            "ContainerStatus",
            encode(ANSWERS["ContainerStatus"], {"status": {"id": B, "state": 1}}),
            id="another's status",
        ),
        pytest.param("ContainerStatus", b"\x7a\x00", id="no status"),
    ],
)
def test_a_bad_answer_is_a_clear_error(path: Path, method: str, answer: bytes) -> None:
    """One sentence without control characters, the remedy, and the reason."""
    with FakeCri(path, told(A, 5), **{method: answer}) as server:
        assert refused(server).reason == cri.BAD_ANSWER


@pytest.mark.parametrize(
    ("info", "said"),
    [
        ("[" * 100_000, "no JSON"),
        ("{", "no JSON"),
        ("[]", "no number"),
        ('{"pid": "1"}', "no number"),
        ('{"pid": true}', "no number"),
        ('{"pid": 1e9}', "no number"),
        ('{"pid": null}', "no number"),
        ('{"pid": -1}', "the pid -1"),
        (json.dumps({"pid": 1 << 64}), f"the pid {1 << 64}"),
        ('{"pid": 1' + "0" * 5000 + "}", "no JSON"),
        (json.dumps({"x": "y" * cri.MAX_INFO_BYTES}), "characters"),
    ],
    ids=range(11),
)
def test_a_bad_pid_is_a_clear_error(path: Path, info: str, said: str) -> None:
    """What containerd tells besides is JSON of its own, and as little trusted."""
    with FakeCri(path, told(A, 5)) as server:
        server.info = lambda _: info
        error = refused(server)
    assert error.reason == cri.BAD_ANSWER
    assert said in error.message


def test_an_answer_that_is_too_large_is_not_taken(path: Path) -> None:
    """The connection refuses it before it is decoded."""
    with FakeCri(path, ListContainers=b"\x7a\x80\x80\x80\x10" + bytes(cri.MAX_ANSWER_BYTES)) as server:
        assert "RESOURCE_EXHAUSTED" in refused(server).message


def test_an_error_of_the_runtime_is_told_in_its_words(path: Path) -> None:
    """Without the control characters in them."""
    with FakeCri(path, ListContainers=grpc.StatusCode.INTERNAL) as server:
        error = refused(server)
    assert error.reason == "CriFailed"
    assert r"INTERNAL: as it was \x1b[2J told" in error.message


def test_another_service_on_the_socket_speaks_no_cri(path: Path) -> None:
    """As a containerd without its CRI plugin."""
    with FakeCri(path, Version=grpc.StatusCode.UNIMPLEMENTED) as server:
        assert refused(server).reason == cri.NOT_SPOKEN


@pytest.mark.parametrize("method", ["Version", "ListContainers", "ContainerStatus"])
def test_no_answer_is_waited_for_no_longer_than_said(path: Path, method: str) -> None:
    """Each question has a deadline."""
    with FakeCri(path, told(A, 5), **{method: None}) as server:
        error = refused(server, call_seconds=0.3)
    assert error.reason == cri.NO_ANSWER
    assert method in error.message


def test_all_questions_together_have_a_deadline(path: Path) -> None:
    """So a runtime that is slow at each of many containers holds nobody up."""
    with FakeCri(path, told(A, 5), ContainerStatus=None) as server:
        begin = time.monotonic()
        assert refused(server, total_seconds=1.0).reason == cri.NO_ANSWER
    assert time.monotonic() - begin < 20


def dead(path: Path) -> None:
    """Leave a socket that nobody listens on."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


@pytest.fixture
def full(path: Path) -> Iterator[None]:
    """Give a socket whose queue is full: nobody accepts."""
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as first:
        listener.bind(str(path))
        listener.listen(0)
        first.connect(str(path))
        yield


def test_a_full_queue_is_no_answer(path: Path, full: None) -> None:
    """To connect does not wait for ever either."""
    with Cri(path, call_seconds=0.2) as asked, pytest.raises(CriCallError) as raised:
        asked.version()
    assert raised.value.reason == cri.NO_ANSWER


def test_nobody_behind_the_path_is_no_answer(path: Path) -> None:
    """A dead socket, a file, nothing at all, a path that is too long: each in the kernel's words."""
    stopped, file = path.with_name("stopped"), path.with_name("file")
    dead(stopped)
    file.write_text("")
    for there, words in (
        (path, "No such file"),
        (stopped, "Connection refused"),
        (file, "Connection refused"),
    ):
        with Cri(there) as asked, pytest.raises(CriCallError, match=words) as raised:
            asked.version()
        assert raised.value.reason == cri.NO_ANSWER
    with Cri(Path("/" + "x" * 300)) as asked, pytest.raises(CriCallError, match="too long"):
        asked.version()


# the codec ----------------------------------------------------------------------------------------------

TABLE: Table = {"number": (1, int), "text": (2, str), "inner": (3, [{"text": (1, str)}])}


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_value_error(data: bytes) -> None:
    """Nothing else comes out of the decoder."""
    try:
        message = decode(TABLE, data)
    except ValueError:
        return
    assert set(message) == set(TABLE)


@pytest.mark.parametrize(
    "data", ["08", "0880", "08" + "ff" * 9 + "02", "08" + "80" * 11, "0b", "0f", "1205", "0d00"]
)
def test_a_bad_message_is_a_value_error(data: str) -> None:
    """Cut off, too large a number, groups, a length beyond the end, another wire type."""
    with pytest.raises(ValueError, match=r"wire type|bytes where|number"):
        decode(TABLE, bytes.fromhex(data))


def test_what_is_in_a_message_counts_towards_the_limit() -> None:
    """Otherwise an answer of 16 MiB would become gigabytes here."""
    data = encode(TABLE, {"inner": [{"text": "x"}] * 5})
    assert len(decode(TABLE, data, limit=10)["inner"]) == 5
    with pytest.raises(ValueError, match="more than 9 fields"):
        decode(TABLE, data, limit=9)


# the comparison -----------------------------------------------------------------------------------------


def test_the_same_in_both_is_ok() -> None:
    """Sandboxes, containers outside of pods and those inside others are nobody's business."""
    seen = [
        in_pod(A, 10),
        in_pod(B, 11, comm="pause"),
        container("/runc-box", 12),
        container(f"/docker/{C}", 13),
        container(f"/kubepods/pod{POD}/{A}/kubepods/pod{POD}/{C}", 14, depth=3),
    ]
    node = CriNode((told(A, 10, pod_uid=POD), told(B, 0, state="exited")), frozenset({B}))
    found = compare(node, seen)
    assert found == Compared(count=1)
    assert judge(found).verdict is Verdict.OK
    assert judge(found).found == "1 running"


@pytest.mark.parametrize(
    ("cri_says", "proc_shows", "found"),
    [
        pytest.param(told(A, NOBODY), [in_pod(A, 10)], f"pid {NOBODY} by CRI, 10 in /proc", id="another pid"),
        pytest.param(
            told(A, NOBODY), [in_pod(B, NOBODY)], f"pid {NOBODY} by CRI, not in /proc", id="not there"
        ),
        pytest.param(told(A, 0), [], "pid ? by CRI, not in /proc", id="not there, pid not told"),
        pytest.param(
            told(A, NOBODY, pod_uid=OTHER_POD),
            [in_pod(A, NOBODY)],
            f"pod {OTHER_POD} by CRI, {POD} in /proc",
            id="another pod",
        ),
    ],
)
def test_what_disagrees_fails_with_both_values(cri_says, proc_shows, found) -> None:
    """Pid, pod, or that it is there at all."""
    row = judge(compare(CriNode((cri_says,), frozenset({B})), proc_shows))
    assert (row.verdict, row.reason) == (Verdict.FAIL, "CriMismatch")
    assert f"{A[:12]} (main): {found}" == row.found
    assert row.remedy


def test_a_made_up_cgroup_inside_another_container_hides_nothing() -> None:
    """A process can name a cgroup of its own as it likes, but only below its container's."""
    liar = container(f"/kubepods/pod{OTHER_POD}/{B}/{A}", NOBODY, depth=3)
    node = CriNode((told(A, NOBODY), told(B, 11)), frozenset())
    found = compare(node, [in_pod(B, 11, OTHER_POD), liar])
    assert found.wrong == [f"{A[:12]} (main): pid {NOBODY} by CRI, not in /proc"]


def test_a_container_of_a_pod_that_the_runtime_does_not_know_is_named() -> None:
    """It may be another runtime's, or what was left of one."""
    row = judge(compare(CriNode((), frozenset()), [in_pod(A, 10)]))
    assert (row.verdict, row.reason) == (Verdict.WARN, "CriUnknownContainer")
    assert f"{A[:12]} (pod {POD}, pid 10)" in row.found
    assert row.remedy


def test_pids_that_are_not_told_are_not_compared() -> None:
    """And the row says so."""
    row = judge(compare(CriNode((told(A, 0),), frozenset()), [in_pod(A, 10)]))
    assert row.verdict is Verdict.OK
    assert row.found == "1 running, 1 by id alone"


def test_the_worst_comes_first_and_nothing_is_lost() -> None:
    """A row with all kinds of problems has each remedy."""
    row = judge(Compared(count=3, wrong=["x"], unknown=["y"], sharing=["z"]))
    assert row.verdict is Verdict.FAIL
    assert row.found == "x; in pods by /proc, unknown to CRI: y; cannot be dumped, share a pid namespace: z"
    assert row.remedy.count("; ") >= 3


def test_what_disagrees_just_once_came_or_went_meanwhile(path: Path) -> None:
    """A container that starts between the two looks is no fault."""
    looks = iter([[in_pod(A, 10), in_pod(B, 11)], [in_pod(A, 10)]])
    with FakeCri(path, told(A, 10)), Cri(path) as asked:
        assert check_containers(asked, lambda: next(looks)).verdict is Verdict.OK
        assert check_containers(asked, lambda: [in_pod(A, 10), in_pod(B, 11)]).verdict is Verdict.WARN


# the rows -----------------------------------------------------------------------------------------------


def verdicts(rows: list[Finding]) -> list[str]:
    """Shorten rows; whatever is no success has something to say, and a warning what to do."""
    assert [each.check for each in rows] == ["node.cri", "node.containers"]
    assert all(each.expected and each.found for each in rows)
    assert all(each.remedy and each.reason for each in rows if each.verdict in (Verdict.WARN, Verdict.FAIL))
    return [each.verdict.value for each in rows]


def test_without_a_socket_both_rows_are_skipped(path: Path) -> None:
    """No runtime is needed; but one that was named must be there."""
    assert verdicts(cri_findings("", sockets=[path])) == ["skip", "skip"]
    rows = cri_findings(str(path))
    assert verdicts(rows) == ["warn", "skip"]
    assert rows[0].found == f"{path}: No such file or directory"


def test_a_dead_socket_is_a_warning(path: Path) -> None:
    """The runtime has stopped, or listens elsewhere."""
    dead(path)
    rows = cri_findings("", sockets=[path])
    assert verdicts(rows) == ["warn", "skip"]
    assert rows[0].reason == cri.NO_ANSWER


def test_a_runtime_without_the_cri_is_a_skip_unless_it_was_named(path: Path) -> None:
    """Docker's containerd stands on machines that are no nodes."""
    with FakeCri(path, Version=grpc.StatusCode.UNIMPLEMENTED):
        assert verdicts(cri_findings("", sockets=[path])) == ["skip", "skip"]
        assert verdicts(cri_findings(str(path))) == ["warn", "skip"]


def test_the_first_socket_that_answers_is_asked(tmp_path: Path) -> None:
    """Others may be left from a runtime that was there before."""
    first, second, third = (tmp_path / name for name in ("1", "2", "3"))
    dead(first)
    with FakeCri(second, Version=grpc.StatusCode.UNIMPLEMENTED), FakeCri(third, told(A, NOBODY)):
        rows = cri_findings("", sockets=[first, second, third])
    assert verdicts(rows) == ["ok", "fail"]
    assert rows[0].found == f"fake v1.2, {third}"
    assert f"pid {NOBODY} by CRI" in rows[1].found


def test_a_bad_answer_is_a_warning_that_names_the_socket(path: Path) -> None:
    """Nothing but this row depends on the runtime."""
    with FakeCri(path, ListContainers=b"\xff" * 30):
        rows = cri_findings(str(path))
    assert verdicts(rows) == ["ok", "warn"]
    assert rows[1].found.startswith(f"{path}: the answer to ListContainers")


def test_the_usual_sockets_are_absolute() -> None:
    """Each is a full path, as the setting's must be."""
    assert all(each.is_absolute() for each in cri_checks.SOCKETS)
    assert os.path.isabs(cri_checks.SOCKETS[0])
