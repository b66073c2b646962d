"""The command from the outside: exit codes, sentences, machine formats, and what hostile words get."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest
import yaml

from hibernode.artifact.store import Store
from hibernode.cli.main import COMMANDS
from hibernode.config import KEYS
from tests.unit.artifact_kit import ID, OTHER, put
from tests.unit.cli_kit import ABSENT, BAD_LOG, ESCAPE, full, here, machine, sentence

__all__ = ["full", "here", "machine"]  # fixtures

HEAVY = {"aiohttp", "pyroute2", "kubernetes", "grpc", "watchdog", "prometheus_client"}


# help, and what it costs --------------------------------------------------------------------------------

GROUPS = {
    "config": ["show"],
    "job": ["render"],
    "metadata": ["check", "get", "rm", "sources", "watch", "workers"],
    "seccomp": ["exec", "check", "install", "show"],
}
EVERY = [(), *((name,) for name in COMMANDS), *((name, sub) for name, subs in GROUPS.items() for sub in subs)]


@pytest.mark.parametrize("words", EVERY, ids=" ".join)
def test_every_command_has_help(machine, here, words):
    """Exit 0, a usage line with the command's own name, and nothing is made on disk."""
    code, out, err = here(*words, "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"Usage: {' '.join(['hibernode', *words])} ")
    assert list(machine.base.iterdir()) == []


def test_the_table_of_groups_is_whole(here):
    """Every command of a group is in the test above, and every group."""
    for name in COMMANDS:
        lines = here(name, "--help")[1].splitlines()
        listed = lines[lines.index("Commands:") + 1 :] if "Commands:" in lines else []
        assert [line.split()[0] for line in listed] == sorted(GROUPS.get(name, []))


@pytest.mark.parametrize(
    "words", [("--help",), ("list",), ("config", "show"), ("inspect", ID), ("status",)], ids=" ".join
)
def test_what_reads_local_files_imports_nothing_heavy(full, words):
    """No HTTP server, no netlink, no cluster client and no watcher."""
    code = "import sys, atexit; atexit.register(lambda: print(*sys.modules, file=sys.stderr))\n"
    code += "from hibernode.cli.main import main; main()"
    result = subprocess.run(
        [sys.executable, "-c", code, *words], env=full.env(), capture_output=True, text=True, check=False
    )
    loaded = {name.partition(".")[0] for name in result.stderr.split()}
    assert "hibernode" in loaded
    assert not HEAVY & loaded


# usage ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("frob",), "'frob'"),
        (("list", "--frob"), "--frob"),
        (("--frob", "list"), "--frob"),
        (("list", "word"), "word"),
        (("list", "--state", "odd"), "'odd'"),
        (("list", "-o", "xml"), "'xml'"),
        (("inspect",), "ID"),
        (("verify",), "--all"),
        (("verify", ID, "--all"), "--all"),
        (("checkpoint",), "nothing"),
        (("checkpoint", "--pid", "2", "--container", "x"), "too much"),
        (("checkpoint", "--container", "../x"), "names no container"),
        (("checkpoint", "--pid", "1"), "1"),
        (("checkpoint", "--pid", "x"), "'x'"),
        (("completion",), "bash"),
        (("completion", "tcsh"), "'tcsh'"),
        (("events", "--limit", "0"), "0"),
        (("explain", "/nowhere.log"), "/nowhere.log"),
        (("--set", "store.path", "list"), "KEY=VALUE"),
        (("--set", "store.pth=/x", "list"), "store.pth"),
        (("--set", "gc.keep_per_id=few", "config", "show"), "gc.keep_per_id = 'few' (flag)"),
        (("--store", "relative", "list"), "store.path = 'relative' (flag)"),
        (("--config", "/nowhere.yaml", "list"), "/nowhere.yaml"),
        (("list", f"{ESCAPE}[2J"), r"\x1b[2J"),
        (("list", "a\nb"), "a"),
        (("seccomp", "frob"), "'frob'"),
        (("inspect", ID, "--version", "../x"), "'../x'"),
        (("inspect", ID, "--version", ""), "'--version': it is empty"),
        (("restore", ID, "--into", ""), "'--into': it is empty"),
        (("restore", ID, "--into", " "), "'--into': it is empty"),
        (("restore", ID, "--version", ""), "'--version': it is empty"),
        (("restore", ""), "is not a checkpoint id"),
        (("checkpoint", "--container", ""), "'--container': it is empty"),
        (("checkpoint", "--pid", "2", "--container", ""), "'--container': it is empty"),
        (("checkpoint", "--pid", "2", "--id", ""), "is not a checkpoint id"),
        (("placeholder", "--install", ""), "'--install': it is empty"),
        (("seccomp", "install", ""), "'DIR': it is empty"),
        (("seccomp", "exec", "--profile", "", "--", "true"), "'--profile': it is empty"),
        (("--store", "", "list"), "store.path = ''"),
        (("--signals", "", "list"), "signals.path = ''"),
        (("--config", "", "list"), "."),
    ],
    ids=lambda value: repr(" ".join(value)) if isinstance(value, tuple) else "",
)
def test_a_wrong_word_is_a_usage_error(here, words, said):
    """Exit 2, one sentence that names the word, one line with what to do, no traceback."""
    code, out, err = here(*words)
    assert (code, out) == (2, "")
    assert said in sentence(err)


def test_a_wrong_word_is_a_usage_error_from_the_outside(machine):
    """The installed program says the same as the entry point above."""
    assert "'frob'" in machine.refused(2, "frob")
    assert "is not a checkpoint id" in machine.refused(2, "inspect", "../x")


def test_an_unknown_key_is_refused_wherever_it_stands(machine):
    """File, environment and flag: the place is named."""
    file = machine.base / "c.yaml"
    file.write_text("frob: 1\n")
    assert f"file {file}: frob is not a setting" in machine.refused(2, "--config", file, "list")
    assert "environment: HIBERNODE_FROB is not" in machine.refused(2, "list", HIBERNODE_FROB="1")
    assert "flag: frob is not a setting" in machine.refused(2, "--set", "frob=1", "list")


HOSTILE_IDS = {
    "a path upwards": "../x",
    "a separator": "a/b",
    "nothing": "",
    "300 characters": "a" * 300,
    "a dot": ".",
    "two dots": "..",
    "a look-alike": "96429b27257б",
    "full-width digits": "\uff19\uff16\uff14\uff12\uff19b272576",
    "upper case": ID.upper(),
    "a line end": f"{ID}\n",
    "a blank": f" {ID}",
    "an escape": f"{ESCAPE}[2J",
    "bytes that are no UTF-8": os.fsdecode(b"\xff" * 12),
    "no hexadecimal": "g" * 16,
    "too long by one": "0" * 17,
}
ID_COMMANDS = ["inspect", "verify", "pin", "unpin", "logs", "retry", "restore", "checkpoint"]


@pytest.mark.parametrize("command", ID_COMMANDS)
def test_fc37_hostile_ids_stop_at_the_gate(full, here, command):
    """FC-37: as an argument of any command each is a usage error, and no file is made or changed."""
    before = sorted(full.base.rglob("*"))
    words = [command, "--pid", str(os.getpid()), "--id"] if command == "checkpoint" else [command, "--"]
    for text in HOSTILE_IDS.values():
        code, out, err = here(*words, text)
        assert (code, out) == (2, "")
        assert "is not a checkpoint id" in sentence(err)
    assert sorted(full.base.rglob("*")) == before


# exit codes -------------------------------------------------------------------------------------------


def test_no_agent_is_exit_3(machine):
    """The socket is named, whether it is absent or a dead agent's."""
    assert f"no agent: {machine.socket} is not there" in machine.refused(3, "status")
    machine.socket.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(machine.socket))
    assert "dead agent" in machine.refused(3, "status")


@pytest.mark.parametrize("command", ["inspect", "verify", "pin", "restore", "logs"])
def test_what_is_not_there_is_exit_1(full, command):
    """The id is named."""
    assert ABSENT in full.refused(1, command, ABSENT)


def test_a_process_that_is_not_there_is_exit_1(machine):
    """Also for doctor; the pid is named."""
    with subprocess.Popen(["true"]) as process:
        process.wait()
    for command in ("checkpoint", "doctor"):
        assert str(process.pid) in machine.refused(1, command, "--pid", str(process.pid))


def test_a_store_that_others_can_read_is_exit_4(full):
    """Refused with the mode, before anything in it is looked at."""
    full.store.chmod(0o755)
    assert "0755" in full.refused(4, "list")


def test_a_corrupted_artifact_is_exit_5(full):
    """A flipped bit: the file is named by verify, in both forms; a damaged manifest by inspect too."""
    pages = full.store / ID / "images" / "pages-1.img"
    data = bytearray(pages.read_bytes())
    data[5] ^= 1
    pages.write_bytes(data)
    for words in ((ID,), ("--all",)):
        result = full.run("verify", *words)
        assert result.returncode == 5
        assert "images/pages-1.img" in result.stdout
    answer = json.loads(full.run("verify", ID, "-o", "json").stdout)
    assert [file["path"] for file in answer["items"][0]["files"] if not file["ok"]] == ["images/pages-1.img"]
    (full.store / ID / "manifest.json").write_text("{}")
    assert ID in full.refused(5, "inspect", ID)


def test_one_bad_artifact_hides_no_other(full):
    """Verify --all goes on after a manifest that cannot be read, and says both."""
    with Store(full.store).open() as store:
        put(store, OTHER)
    (full.store / OTHER / "manifest.json").write_text("no manifest")
    result = full.run("verify", "--all")
    assert result.returncode == 5
    rows = [line.split() for line in result.stdout.splitlines()[1:]]
    assert {(row[0], row[1]) for row in rows} == {(ID, "ok"), (OTHER, "bad")}


def test_a_store_that_cannot_be_made_is_exit_5(machine):
    """Input and output that fail are one sentence."""
    assert "/proc/nowhere" in machine.refused(5, "--store", "/proc/nowhere/store", "pin", ID)


def test_debug_shows_where_it_happened(machine):
    """--debug adds the traceback and keeps the exit code."""
    result = machine.run("--debug", "inspect", ABSENT)
    assert result.returncode == 1
    assert result.stderr.startswith("Traceback")
    assert "NotFoundError" in result.stderr
    other = machine.run("seccomp", "exec", "--", "/nowhere/program", "--debug")
    assert other.returncode == 127
    assert "Traceback" not in other.stderr


# machine formats --------------------------------------------------------------------------------------

SHOWING = {
    "list": ("ArtifactList", 0, ("list",)),
    "inspect": ("Artifact", 0, ("inspect", ID)),
    "verify": ("Verification", 0, ("verify", ID)),
    "gc": ("GarbageCollection", 0, ("gc",)),
    "gc --dry-run": ("GarbageCollection", 0, ("gc", "--dry-run")),
    "pin": ("Pin", 0, ("pin", ID)),
    "unpin": ("Pin", 0, ("unpin", ID)),
    "retry": ("Retry", 0, ("retry", ID)),
    "logs": ("Log", 0, ("logs", ID)),
    "explain": ("Explanation", 0, ("explain", "BAD_LOG")),
    "events": ("EventList", 0, ("events",)),
    "config show": ("Config", 0, ("config", "show")),
    "version": ("Version", 0, ("version",)),
    "seccomp check": ("SeccompCheck", 1, ("seccomp", "check", "SELF")),
    "seccomp install": ("SeccompInstall", 0, ("seccomp", "install", "DIR")),
    "doctor": ("Doctor", None, ("doctor",)),
}


@pytest.mark.parametrize(("form", "parse"), [("json", json.loads), ("yaml", yaml.safe_load)])
@pytest.mark.parametrize("name", SHOWING)
def test_machines_can_read_all_that_is_shown(full, here, name, form, parse):
    """-o json and -o yaml give one object with apiVersion and kind, on standard output alone."""
    kind, code, words = SHOWING[name]
    log = full.base / "bad.log"
    log.write_text(BAD_LOG)
    place = {"BAD_LOG": str(log), "DIR": str(full.base / "kubelet"), "SELF": str(os.getpid())}
    result_code, out, _ = here(*(place.get(word, word) for word in words), "-o", form)
    assert result_code == code or (code is None and result_code in (0, 1))
    answer = parse(out)
    assert answer["apiVersion"] == "hibernode.io/v1"
    assert answer["kind"] == kind


@pytest.mark.parametrize("name", ["list", "verify", "doctor", "events"])
def test_nothing_is_coloured_when_piped(full, name):
    """Verdicts and states are plain words there, also where the terminal's name promises colour."""
    result = full.run(*SHOWING[name][2], TERM="xterm-256color", FORCE_COLOR="1")
    assert result.stdout
    assert ESCAPE not in result.stdout


def test_config_show_tells_where_each_value_came_from(machine):
    """Default, file, environment and flag, in the table and for machines."""
    file = machine.base / "c.yaml"
    file.write_text("checkpoint: {attempts: 7}\n")
    words = ("--config", file, "--set", "gc.keep_per_id=9", "config", "show")
    answer = json.loads(machine.ok(*words, "-o", "json", NODE_NAME="era"))
    assert [setting["key"] for setting in answer["settings"]] == list(KEYS)
    found = {setting["key"]: (setting["value"], setting["source"]) for setting in answer["settings"]}
    assert found["criu.log_level"] == (4, "default")
    assert found["checkpoint.attempts"] == (7, f"file {file}")
    assert found["store.path"] == (str(machine.store), "env HIBERNODE_STORE_PATH")
    assert found["node_name"] == ("era", "env NODE_NAME")
    assert found["gc.keep_per_id"] == (9, "flag")
    lines = [line.split() for line in machine.ok(*words).splitlines()]
    assert ["gc.keep_per_id", "9", "flag"] in lines
    assert ["checkpoint.attempts", "7", "file", str(file)] in lines
