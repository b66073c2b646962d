"""The command as people use it: what a terminal shows, what a shell completes, with an agent and without."""

from __future__ import annotations

import json
import os
import pty
import select
import socket
import subprocess
import termios
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from hibernode.artifact.store import Store
from hibernode.cli.output import LONG_WORD
from hibernode.events import EventLog
from hibernode.journal import JOURNAL
from hibernode.state import StateDir
from hibernode.workload import CheckpointId
from tests.unit.artifact_kit import FILES, ID, OTHER, PROCESS, put, seal
from tests.unit.cli_kit import BAD_LOG, ESCAPE, HIBERNODE, Machine, full, machine

__all__ = ["full", "machine"]  # fixtures

# people -----------------------------------------------------------------------------------------------


def test_what_is_empty_says_so(machine):
    """No bare heads: an empty store, no events, nothing to remove; and looking makes no store."""
    assert machine.ok("list") == f"no checkpoints in the store {machine.store}\n"
    assert machine.ok("list", "--state", "corrupt").startswith("no corrupt checkpoints")
    assert machine.ok("events") == f"no events in {machine.state}\n"
    assert not machine.store.exists()
    assert machine.ok("gc") == "nothing to remove\n"
    assert json.loads(machine.ok("list", "-o", "json"))["items"] == []


def test_hostile_names_are_shown_as_escapes(machine):
    """A process chooses its own name and arguments; neither steers the terminal nor makes a line."""
    name = f"{ESCAPE}[2Jx\ny"
    process = {**PROCESS, "comm": name, "cmdline": [name, "\u202e"]}
    tree = [{"pid": 100, "ppid": 1, "pgid": 100, "sid": 100, "threads": [100], "comm": name}]
    with Store(machine.store).open() as store:
        put(store, process=process, tree=tree)
    out = machine.ok("inspect", ID)
    assert r"\x1b[2Jx\ny" in out
    assert all(line.isprintable() for line in out.splitlines())
    assert json.loads(machine.ok("inspect", ID, "-o", "json"))["process"]["comm"] == name


def test_hostile_log_lines_are_shown_as_escapes(machine):
    """CRIU's log quotes names; logs and explain show them harmless."""
    with StateDir.open(machine.state).root:
        StateDir.open(machine.state).keep_log(ID, "dump", f"(0.1) {ESCAPE}]0;t\x07\n{BAD_LOG}".encode())
    out = machine.ok("logs", ID)
    assert r"\x1b]0;t\x07" in out
    assert all(line.isprintable() for line in out.splitlines())
    assert len(machine.ok("logs", ID, "--lines", "1").splitlines()) == len(out.splitlines()) - 1


CONTAINER = {
    "id": "3f2a91c07be4" + "0" * 52,
    "name": "worker",
    "runtime": "containerd",
    "pod_uid": "0b7ad2b4-3c5f-4d6e-8f90-123456789abc",
    "mounts": [{"key": "m0", "mount_point": "/models", "fs_type": "ext4", "directory": True}],
    "lower": ["/layers/7/fs", "/layers/1/fs"],
    "diffs": [{"file": "rootfs.tar", "mount_point": "/", "entries": 12, "bytes": 2048}],
}


def put_container(machine: Machine) -> None:
    """Put the checkpoint of a container into the store."""
    with Store(machine.store).open() as store:
        put(store, contents={**FILES, "rootfs.tar": b"tar"}, container=CONTAINER)


def test_a_container_is_shown_with_its_image_its_changes_and_its_mounts(machine):
    """What a restore has to bring along, without reading JSON."""
    put_container(machine)
    out = machine.ok("inspect", ID)
    assert f"container worker, 3f2a91c07be4, containerd, pod {CONTAINER['pod_uid']}" in out
    assert "image   2 layers, the topmost /layers/7/fs" in out
    assert "changed rootfs.tar: 12 entries, 2.0 KiB" in out
    assert "mounts  /models" in out
    assert " worker " in machine.ok("list").splitlines()[1]
    assert json.loads(machine.ok("list", "-o", "json"))["items"][0]["container"] == "worker"


def test_a_container_without_one_to_take_it_is_refused_in_one_row(machine):
    """Nothing of the node is compared with what was in a container."""
    put_container(machine)
    result = machine.run("restore", ID, "--dry-run", "-o", "json")
    (row,) = json.loads(result.stdout)["findings"]
    assert (result.returncode, row["check"], row["verdict"]) == (4, "restore.container", "fail")
    assert "--into CONTAINER" in row["remedy"]


def put_run(machine: Machine, started_at: float, log: str | None, **journal: object) -> None:
    """Leave behind what a restore leaves."""
    run = machine.state / "restores" / f"{ID}.{started_at:032.0f}"
    run.mkdir(mode=0o700)
    (run / "journal.json").write_text(json.dumps({"started_at": started_at, **journal}))
    if log is not None:
        (run / "restore.log").write_text(log)


def test_the_log_of_a_restore_goes_with_the_reason_of_the_last_failure(machine):
    """One that was refused has no log of CRIU's: the log of an older one must not mislead."""
    with StateDir.open(machine.state).root:
        pass
    put_run(machine, 1.0, None, error="RestoreIncompatible: no mount at /models")
    refused = machine.refused(1, "logs", "--restore", ID)
    assert "its last restore failed before criu began: RestoreIncompatible: no mount at /models" in refused
    put_run(machine, 2.0, "(00.1) Restore finished successfully. Tasks resumed.\n", error="")
    out = machine.ok("logs", "--restore", ID)
    assert "criu itself has succeeded" in out
    assert "the last restore failed" not in out
    put_run(machine, 3.0, None, error=f"PidInUse: {ESCAPE}x")
    assert r"the last restore failed: PidInUse: \x1bx" in machine.ok("logs", "--restore", ID)


def on_terminal(machine: Machine, *words: str) -> list[str]:
    """Run the command on a terminal of 100 columns; returns its lines without colours."""
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (40, 100))
    env = machine.env(TERM="xterm", NO_COLOR="1")
    data = b""
    with subprocess.Popen(
        [HIBERNODE, *words], stdin=subprocess.DEVNULL, stdout=slave, stderr=slave, env=env
    ) as process:
        os.close(slave)
        try:
            while select.select([master], [], [], 60)[0]:
                data += os.read(master, 65536)
        except OSError:
            pass  # a terminal whose other end is closed gives EIO
        finally:
            os.close(master)
    assert process.returncode in (0, 1)
    return data.decode().replace("\r\n", "\n").splitlines()


@pytest.mark.parametrize("words", [("doctor",), ("events",), ("config", "show"), ("list",)], ids=" ".join)
def test_tables_fit_a_terminal(full, words):
    """At 100 columns wide cells are wrapped; only a word that is longer than that may stick out."""
    log = EventLog(full.state)
    log.add("Warning", "DumpFailed", ID, "a sentence that goes on " * 20)
    log.close()
    lines = on_terminal(full, *words)
    assert len(lines) > 1
    assert [line for line in lines if len(line) > 100 and max(map(len, line.split())) <= LONG_WORD] == []


def test_the_remedy_stands_under_its_row(machine):
    """Doctor names what to do on a line of its own, and no column is wide because of it."""
    lines = machine.run("doctor").stdout.splitlines()
    assert lines[0].split() == ["VERDICT", "CHECK", "EXPECTED", "FOUND"]
    row = next(number for number, line in enumerate(lines) if line.split()[1:2] == ["signals.path"])
    assert lines[row].startswith("warn")
    assert lines[row + 1].startswith("          remedy: ")


def test_an_agent_that_only_reports_is_not_asked_for_what_dumps_need(machine):
    """A reporter has no CRIU, store or capability, and nothing is wrong with it."""
    rows = json.loads(machine.run("--set", "checkpoint.enabled=false", "doctor", "-o", "json").stdout)
    found = {row["check"]: row["verdict"] for row in rows["findings"]}
    assert found["host.checkpoints"] == "skip"
    assert all(name.startswith("node.") for name in found if name != "host.checkpoints")


def test_a_reader_that_has_gone_ends_the_command_quietly(machine):
    """As in `hibernode config show | head -1`: no message, and the code that SIGPIPE would give."""
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run(
        [HIBERNODE, "config", "show"], env=machine.env(), stdout=writer, stderr=subprocess.PIPE, check=False
    )
    os.close(writer)
    assert (result.returncode, result.stderr) == (141, b"")


# completion -------------------------------------------------------------------------------------------


def complete(machine: Machine, *words: str) -> list[str]:
    """Ask a real bash, with the script loaded, what the last of ``words`` could become."""
    script = """
        eval "$(hibernode completion bash)" || exit 9
        COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
        spec=$(complete -p hibernode) || exit 8
        function=${spec#*-F }; function=${function%% *}
        "$function" hibernode "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
        printf '%s\n' "${COMPREPLY[@]}"
    """
    result = subprocess.run(
        ["bash", "--norc", "-c", script, "bash", "hibernode", *words],
        env=machine.env(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout.split()


def test_bash_completes_commands_options_and_ids(full):
    """With the printed script loaded into bash."""
    assert complete(full, "ins") == ["inspect"]
    assert complete(full, "seccomp", "in") == ["install"]
    assert complete(full, "list", "--sta") == ["--state"]
    assert complete(full, "list", "--state", "cor") == ["corrupt"]
    assert complete(full, "inspect", "96") == [ID]
    assert complete(full, "inspect", "ff") == []


def test_completion_looks_into_the_store_of_the_line(full, tmp_path):
    """A --store that is typed already counts; one that is not there is not made and nothing is said."""
    other = tmp_path / "other"
    with Store(other).open() as store:
        put(store, OTHER)
    assert complete(full, "--store", str(other), "inspect", "") == [OTHER]
    absent = tmp_path / "absent"
    assert complete(full, "--store", str(absent), "inspect", "") == []
    assert complete(full, "--store", "relative", "inspect", "") == []
    assert not absent.exists()


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_a_script_too(machine, shell):
    """It names the program and the variable that asks it."""
    out = machine.ok("completion", shell)
    assert "_HIBERNODE_COMPLETE" in out


# gc and retry: with an agent and without ----------------------------------------------------------------


def abandon(machine: Machine, step: str, *, sealed: bool) -> Path:
    """Leave a staging directory as a killed agent does; returns it."""
    with Store(machine.store).open() as store:
        staging = store.stage(ID)
        if sealed:
            seal(store, staging)
        note = {"kind": "checkpoint", "step": step, "announce": True, "pid": 0}
        (staging.path / JOURNAL).write_text(json.dumps(note))
        path: Path = staging.path
        staging.close()
    return path


def test_gc_finishes_what_a_dead_agent_had_sealed(machine):
    """A sealed dump is published, not removed as a leftover; the dry run says so and touches nothing."""
    path = abandon(machine, "publish", sealed=True)
    answer = json.loads(machine.ok("gc", "--dry-run", "-o", "json"))
    assert [item["ending"] for item in answer["recovered"]] == ["pending"]
    assert path.exists()
    answer = json.loads(machine.ok("gc", "-o", "json"))
    assert [(item["id"], item["ending"]) for item in answer["recovered"]] == [(ID, "finished")]
    assert not path.exists()
    assert machine.run("verify", ID).returncode == 0


def test_gc_answers_for_a_dump_that_cannot_be_finished(machine):
    """Its worker has ended, so the signal file says that it failed before the leftovers go."""
    machine.signals.mkdir()
    path = abandon(machine, "dump", sealed=False)
    assert "failed" in machine.ok("gc")
    assert not path.exists()
    answer = json.loads((machine.signals / f"{ID}.done").read_text())
    assert answer["success"] is False
    assert "WorkerGone" in answer["error"]


@contextmanager
def agent(machine: Machine, answers: Mapping[str, object]) -> Iterator[list[str]]:
    """Answer on the agent's socket, one connection at a time; yields the requests' first lines."""
    machine.socket.parent.mkdir()
    asked: list[str] = []
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(machine.socket))
        server.listen()

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    line = connection.recv(65536).decode().splitlines()[0].rpartition(" ")[0]
                    asked.append(line)
                    body = json.dumps(answers[line.split()[1].partition("?")[0]]).encode()
                    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n"
                    connection.sendall(head.encode() + body)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield asked
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


GONE = {"id": ID, "uuid": "0" * 32, "path": "/x", "bytes": 2048, "why": "partial: x"}


def test_a_running_agent_is_asked_to_collect(machine):
    """It alone recovers and removes, by its own rules; the command leaves the store alone."""
    path = abandon(machine, "publish", sealed=True)
    answers = {"/v1/status": {"store": {"path": str(machine.store)}}, "/v1/gc": {"items": [GONE]}}
    with agent(machine, answers) as asked:
        assert machine.ok("gc").splitlines()[-1] == "2.0 KiB freed"
        assert machine.ok("gc", "--dry-run").splitlines()[-1] == "2.0 KiB would be freed"
    assert asked[1::2] == ["POST /v1/gc?dry_run=false", "POST /v1/gc?dry_run=true"]
    assert path.exists()


def test_the_agent_of_another_store_is_not_asked(machine):
    """--store names what is collected, whatever agent runs on this machine."""
    abandon(machine, "publish", sealed=True)
    with agent(machine, {"/v1/status": {"store": {"path": "/elsewhere"}}}) as asked:
        assert "finished" in machine.ok("gc")
    assert asked == ["GET /v1/status"]


def test_rules_given_by_flag_are_applied_here(machine):
    """The agent knows its own rules only; what it works on is left to it."""
    path = abandon(machine, "publish", sealed=True)
    with Store(machine.store).open() as store:
        put(store, OTHER)
    with agent(machine, {"/v1/status": {"store": {"path": str(machine.store)}}}) as asked:
        out = json.loads(machine.ok("--set", "gc.max_age_seconds=0", "gc", "--dry-run", "-o", "json"))
    assert out["recovered"] == []
    assert asked == ["GET /v1/status"]
    assert path.exists()


def test_retry_asks_the_agent_or_forgets_by_itself(machine):
    """The same answer either way."""
    state = StateDir.open(machine.state)
    state.attempt_begins(CheckpointId(ID))
    assert json.loads(machine.ok("retry", ID, "-o", "json"))["forgotten"] is True
    assert machine.ok("retry", ID) == f"{ID}: there were no failed attempts\n"
    state.close()
    answers = {"/v1/status": {"store": {"path": str(machine.store)}}, "/v1/retry": {"forgotten": True}}
    with agent(machine, answers) as asked:
        assert machine.ok("retry", ID) == f"{ID}: failed attempts forgotten\n"
    assert asked[1] == f"POST /v1/retry?id={ID}"
