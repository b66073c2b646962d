"""Reading seccomp profiles, and installing the one that ships."""

import json
import os
import stat
from pathlib import Path

import pytest

from hibernode.cli.main import main
from hibernode.errors import UsageError
from hibernode.host.seccomp_profile import (
    BUILTIN_PROFILE,
    MAX_PROFILE_BYTES,
    Condition,
    Rule,
    load_profile,
    parse_profile,
)

ALLOW = 0x7FFF0000
ERRNO = 0x00050000


def profile(**fields: object) -> bytes:
    """Make a profile with these fields."""
    return json.dumps({"defaultAction": "SCMP_ACT_ALLOW", **fields}).encode()


def rule(**fields: object) -> bytes:
    """Make a profile with one rule that has these fields."""
    return profile(syscalls=[{"names": ["chmod"], "action": "SCMP_ACT_ERRNO", **fields}])


def argument(**fields: object) -> bytes:
    """Make a profile with one rule whose condition has these fields."""
    return rule(args=[{"index": 0, "value": 1, "op": "SCMP_CMP_EQ", **fields}])


def test_the_profile_that_ships_denies_the_three_io_uring_calls_and_nothing_else():
    """The three calls get EPERM on all five architectures and every other call is allowed."""
    read = load_profile(BUILTIN_PROFILE)
    assert read.default_action == ALLOW
    assert read.rules == (Rule(("io_uring_setup", "io_uring_enter", "io_uring_register"), ERRNO | 1),)
    assert {name.removeprefix("SCMP_ARCH_") for name in read.architectures} == {
        "X86_64",
        "X86",
        "X32",
        "AARCH64",
        "ARM",
    }


def test_the_profile_that_ships_says_its_error_number():
    """Runtimes disagree on the error number of a rule that names none, so ours names it."""
    assert json.loads(BUILTIN_PROFILE.read_bytes())["syscalls"][0]["errnoRet"] == 1


@pytest.mark.parametrize(
    ("data", "action"),
    [
        pytest.param(rule(), ERRNO | 1, id="an error without a number is EPERM"),
        pytest.param(rule(errnoRet=38), ERRNO | 38, id="an error with a number keeps it"),
        pytest.param(rule(action="SCMP_ACT_KILL"), 0, id="kill means the thread"),
        pytest.param(rule(action="SCMP_ACT_KILL_THREAD"), 0, id="kill thread"),
        pytest.param(rule(action="SCMP_ACT_KILL_PROCESS"), 0x80000000, id="kill process"),
        pytest.param(rule(action="SCMP_ACT_TRAP"), 0x00030000, id="trap"),
        pytest.param(rule(action="SCMP_ACT_LOG"), 0x7FFC0000, id="log"),
        pytest.param(rule(args=None), ERRNO | 1, id="args may be null, as Go writes an empty list"),
    ],
)
def test_actions_are_read(data, action):
    """Each action becomes the number that libseccomp takes."""
    assert parse_profile(data).rules == (Rule(("chmod",), action),)


def test_conditions_are_read():
    """A condition keeps its index, its comparison and both 64-bit values."""
    data = argument(index=5, value=2**64 - 1, valueTwo=7, op="SCMP_CMP_MASKED_EQ")
    assert parse_profile(data).rules[0].conditions == (Condition(5, 7, 2**64 - 1, 7),)


def test_a_default_action_may_be_an_error():
    """The default error number is read too, and is EPERM if absent."""
    assert (
        parse_profile(b'{"defaultAction": "SCMP_ACT_ERRNO", "defaultErrnoRet": 5}').default_action
        == ERRNO | 5
    )
    assert parse_profile(b'{"defaultAction": "SCMP_ACT_ERRNO"}').default_action == ERRNO | 1


@pytest.mark.parametrize(
    ("data", "field"),
    [
        pytest.param(b"", "", id="nothing"),
        pytest.param(b"{", "", id="half a file"),
        pytest.param(b"\xff\xfe", "", id="bytes that are no text"),
        pytest.param(b"[" * 100_000, "", id="nested without end"),
        pytest.param(b'{"defaultErrnoRet": ' + b"9" * 10_000 + b"}", "", id="a number without end"),
        pytest.param(b" " * (MAX_PROFILE_BYTES + 1), "", id="larger than the limit"),
        pytest.param(b"[]", "", id="a list"),
        pytest.param(b"{}", "defaultAction", id="no default action"),
        pytest.param(profile(defaultAction=7), "defaultAction", id="a default action that is a number"),
        pytest.param(
            profile(defaultAction="ALLOW"), "defaultAction", id="a default action without its prefix"
        ),
        pytest.param(profile(defaultErrnoRet=1), "defaultErrnoRet", id="an error number beside allow"),
        pytest.param(profile(listenerPath="/run/x"), "listenerPath", id="a listener"),
        pytest.param(profile(archMap=[]), "archMap", id="Docker's own form"),
        pytest.param(
            b'{"defaultAction": "SCMP_ACT_ALLOW", "defaultAction": "SCMP_ACT_LOG"}',
            "defaultAction",
            id="twice",
        ),
        pytest.param(
            profile(architectures="SCMP_ARCH_X86"), "architectures", id="architectures that are no list"
        ),
        pytest.param(
            profile(architectures=["amd64"]), "architectures[0]", id="an architecture of another form"
        ),
        pytest.param(profile(architectures=[{}]), "architectures[0]", id="an architecture that is an object"),
        pytest.param(
            profile(flags=["SECCOMP_FILTER_FLAG_NEW_LISTENER"]), "flags[0]", id="a flag that needs a listener"
        ),
        pytest.param(profile(syscalls={}), "syscalls", id="syscalls that are an object"),
        pytest.param(profile(syscalls=["chmod"]), "syscalls[0]", id="a syscall that is a name"),
        pytest.param(rule(name="chmod"), "syscalls[0].name", id="the old singular name"),
        pytest.param(
            rule(includes={"caps": ["CAP_X"]}),
            "syscalls[0].includes",
            id="a rule that depends on capabilities",
        ),
        pytest.param(rule(names=None), "syscalls[0].names", id="no names"),
        pytest.param(rule(names=[]), "syscalls[0].names", id="an empty list of names"),
        pytest.param(rule(names=["ok", "rm -rf"]), "syscalls[0].names[1]", id="a name with a blank"),
        pytest.param(rule(names=[425]), "syscalls[0].names[0]", id="a syscall's number"),
        pytest.param(rule(action="SCMP_ACT_NOTIFY"), "syscalls[0].action", id="an action for a listener"),
        pytest.param(rule(action="SCMP_ACT_TRACE"), "syscalls[0].action", id="an action for a tracer"),
        pytest.param(rule(action=["SCMP_ACT_KILL"]), "syscalls[0].action", id="a list of actions"),
        pytest.param(
            rule(action="SCMP_ACT_KILL", errnoRet=1), "syscalls[0].errnoRet", id="an error number beside kill"
        ),
        pytest.param(rule(errnoRet=4096), "syscalls[0].errnoRet", id="an error number over the kernel's"),
        pytest.param(rule(errnoRet=-1), "syscalls[0].errnoRet", id="a negative error number"),
        pytest.param(rule(errnoRet=True), "syscalls[0].errnoRet", id="true for a number"),
        pytest.param(rule(errnoRet=1.0), "syscalls[0].errnoRet", id="a fraction for a number"),
        pytest.param(argument(index=6), "syscalls[0].args[0].index", id="a seventh argument"),
        pytest.param(argument(op="=="), "syscalls[0].args[0].op", id="a comparison of another form"),
        pytest.param(argument(value=2**64), "syscalls[0].args[0].value", id="a value over 64 bits"),
        pytest.param(argument(valueTwo="1"), "syscalls[0].args[0].valueTwo", id="text for a value"),
        pytest.param(argument(mask=1), "syscalls[0].args[0].mask", id="an unknown field of a condition"),
    ],
)
def test_a_wrong_profile_is_refused(data, field):
    """What is not exactly a profile is a usage error that names the source and the field."""
    with pytest.raises(UsageError) as caught:
        parse_profile(data, source="given.json")
    assert caught.value.fields["field"] == field
    assert caught.value.message.startswith("given.json: ")
    assert field in caught.value.message
    assert len(caught.value.message) < 500


def test_a_profile_file_may_be_reached_through_a_link(tmp_path):
    """A ConfigMap volume shows its files as links, so links are followed."""
    (tmp_path / "link").symlink_to(BUILTIN_PROFILE)
    assert load_profile(tmp_path / "link") == load_profile(BUILTIN_PROFILE)


@pytest.mark.parametrize("kind", ["absent", "directory", "fifo", "device", "huge"])
def test_a_profile_file_that_is_none_is_refused(tmp_path, kind):
    """A file that is absent, odd or huge is a usage error and nothing waits for it."""
    path = tmp_path / "profile.json"
    match kind:
        case "directory":
            path.mkdir()
        case "fifo":
            os.mkfifo(path)
        case "device":
            path = Path("/dev/zero")
        case "huge":
            with path.open("wb") as file:
                file.truncate(1 << 40)
    with pytest.raises(UsageError, match=str(path)):
        load_profile(path)


def names(folder: Path) -> list[str]:
    """List what is in a folder."""
    return [path.name for path in folder.iterdir()]


def run(*arguments: object) -> int:
    """Run ``hibernode seccomp`` in this process; returns its exit code."""
    with pytest.raises(SystemExit) as caught:
        main(["seccomp", *map(str, arguments)])
    return int(caught.value.code or 0)


def test_show_prints_the_profile(capsys):
    """What show prints is the file, byte for byte."""
    assert run("show") == 0
    assert capsys.readouterr().out.encode() == BUILTIN_PROFILE.read_bytes()


def test_install_writes_once_and_repairs(tmp_path, capsys):
    """The file is made readable by all, left alone when right, and put right when wrong."""
    root = tmp_path / "kubelet" / "seccomp"
    path = root / "profiles" / "block-iouring.json"
    assert run("install", root) == 0
    assert capsys.readouterr().out == f"installed {path} (localhostProfile: profiles/block-iouring.json)\n"
    assert path.read_bytes() == BUILTIN_PROFILE.read_bytes()
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    first = path.stat()
    assert run("install", root) == 0
    assert capsys.readouterr().out.startswith("unchanged ")
    assert path.stat() == first
    path.write_text("{}")
    assert run("install", root, "-o", "json") == 0
    assert json.loads(capsys.readouterr().out)["state"] == "updated"
    path.chmod(0o600)
    assert run("install", root) == 0
    assert capsys.readouterr().out.startswith("updated ")
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert names(path.parent) == [path.name]


def test_install_takes_another_name(tmp_path):
    """--name is the file's name below profiles."""
    assert run("install", tmp_path, "--name", "no-uring.json") == 0
    assert names(tmp_path / "profiles") == ["no-uring.json"]


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a/b", "../../etc/x", "-x", "a\nb", "a" * 101])
def test_install_refuses_a_name_that_is_a_path(tmp_path, name):
    """A name that could leave the folder or hide in it is a usage error."""
    assert run("install", tmp_path, f"--name={name}") == 2
    assert names(tmp_path) == []


@pytest.mark.parametrize("where", ["the folder", "the file", "DIR"])
def test_install_follows_no_link(tmp_path, where, capsys):
    """A link in place of DIR, the folder or the file is refused and what it points to stays as it is."""
    target = tmp_path / "elsewhere"
    root = tmp_path / "root"
    match where:
        case "DIR":
            target.mkdir()
            root.symlink_to(target)
        case "the folder":
            target.mkdir()
            root.mkdir()
            (root / "profiles").symlink_to(target)
        case _:
            target.write_text("precious")
            (root / "profiles").mkdir(parents=True)
            (root / "profiles" / "block-iouring.json").symlink_to(target)
    assert run("install", root) == 4
    assert str(root) in capsys.readouterr().err
    assert target.read_text() == "precious" if target.is_file() else names(target) == []


def test_install_refuses_a_file_that_blocks_or_is_shared(tmp_path):
    """A FIFO and a second name of somebody's file are refused, and nothing waits."""
    folder = tmp_path / "profiles"
    folder.mkdir()
    os.mkfifo(folder / "fifo.json")
    assert run("install", tmp_path, "--name", "fifo.json") == 4
    (tmp_path / "other").write_text("precious")
    os.link(tmp_path / "other", folder / "linked.json")
    assert run("install", tmp_path, "--name", "linked.json") == 4
    assert (tmp_path / "other").read_text() == "precious"
