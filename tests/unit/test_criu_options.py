"""The command lines that CRIU is given."""

from dataclasses import replace
from pathlib import Path

import pytest

from hibernode.criu.options import DumpOptions, RestoreOptions, dump_args, restore_args

DUMP = DumpOptions(
    leave="running",
    shell_job=False,
    tcp="close",
    file_locks=True,
    link_remap=True,
    ghost_limit_bytes=512 << 20,
    freeze_timeout_seconds=60.0,
    log_level=4,
)
RESTORE = RestoreOptions(
    shell_job=False,
    tcp="close",
    file_locks=True,
    link_remap=True,
    ghost_limit_bytes=512 << 20,
    log_level=4,
)
IMAGES = Path("/store/images")


def dump(**changes) -> list[str]:
    return dump_args(123, IMAGES, replace(DUMP, **changes))


def restore(**changes) -> list[str]:
    return restore_args(IMAGES, Path("/run/pid"), replace(RESTORE, **changes))


def value(args: list[str], option: str) -> str:
    """Tell the word after ``option``."""
    return args[args.index(option) + 1]


def test_a_dump_in_full():
    """The whole command line of a dump, as one list."""
    assert dump() == [
        *("dump", "--tree", "123", "--images-dir", "/store/images", "--log-file", "dump.log"),
        *("--no-default-config", "-v4", "--libdir", "/proc/self/task", "--manage-cgroups=ignore"),
        *("--ext-unix-sk", "--skip-in-flight", "--tcp-close", "--file-locks", "--link-remap"),
        *("--ghost-limit", "536870912", "--leave-running", "--timeout", "60"),
    ]


def test_a_restore_in_full():
    """The whole command line of a restore, as one list."""
    assert restore() == [
        *("restore", "--images-dir", "/store/images", "--log-file", "restore.log", "--pidfile", "/run/pid"),
        *("--no-default-config", "-v4", "--libdir", "/proc/self/task", "--manage-cgroups=ignore"),
        *("--ext-unix-sk", "--skip-in-flight", "--tcp-close", "--file-locks", "--link-remap"),
        *("--ghost-limit", "536870912", "--restore-detached"),
    ]


@pytest.mark.parametrize(
    ("changes", "there", "absent"),
    [
        pytest.param({"leave": "stopped"}, ["--leave-stopped"], ["--leave-running"], id="left stopped"),
        pytest.param(
            {"leave": "killed"}, [], ["--leave-running", "--leave-killed"], id="CRIU's own way, killed"
        ),
        pytest.param({"shell_job": True}, ["--shell-job"], [], id="a shell job"),
        pytest.param({"shell_job": False}, [], ["--shell-job"], id="no shell job"),
        pytest.param({"tcp": "established"}, ["--tcp-established"], ["--tcp-close"], id="connections kept"),
        pytest.param({"tcp": "close"}, ["--tcp-close"], ["--tcp-established", "--network-lock"], id="closed"),
        pytest.param({"file_locks": False}, [], ["--file-locks"], id="no file locks"),
        pytest.param({"link_remap": False}, [], ["--link-remap"], id="no link remap"),
        pytest.param({"log_level": 0}, ["-v1"], ["-v0"], id="errors are always logged"),
    ],
)
def test_each_option_of_a_dump(changes, there, absent):
    """An option is in the command line exactly when it is asked for."""
    args = dump(**changes)
    assert set(there) <= set(args)
    assert not set(absent) & set(args)


@pytest.mark.parametrize(
    ("seconds", "word"),
    [
        pytest.param(60.0, "60", id="whole"),
        pytest.param(0.2, "1", id="a fraction is not turned into 0, which would be no timeout"),
        pytest.param(59.5, "60", id="rounded up"),
        pytest.param(0.0, "0", id="off"),
    ],
)
def test_the_freeze_timeout_is_in_whole_seconds(seconds, word):
    """FC-43: CRIU takes whole seconds for collecting the tasks, and its own 10 s is never used."""
    assert value(dump(freeze_timeout_seconds=seconds), "--timeout") == word


def test_kept_connections_are_locked_without_an_outside_program():
    """CRIU's default is iptables, which a node may not have; nftables is built in."""
    assert value(dump(tcp="established"), "--network-lock") == "nftables"
    assert value(dump(tcp="established", network_lock="skip"), "--network-lock") == "skip"


def test_dump_and_restore_agree_where_they_must():
    """What an image was dumped with is what it is restored with: CRIU refuses, or worse, if they differ."""
    same = ["--shell-job", "--tcp-established", "--file-locks", "--link-remap", "--ext-unix-sk"]
    for args in (dump(shell_job=True, tcp="established"), restore(shell_job=True, tcp="established")):
        assert set(same) <= set(args)


def test_no_plugin_can_be_loaded():
    """The plugin directory exists and holds nothing that ends in .so, and nobody can put something there."""
    for args in (dump(), restore()):
        names = [path.name for path in Path(value(args, "--libdir")).iterdir()]
        assert names
        assert all(name.isdecimal() for name in names)
        with pytest.raises(OSError):
            Path(value(args, "--libdir"), "x.so").touch()


def test_external_resources_and_scripts_are_handed_on():
    """Each external resource, inherited descriptor and script is an option with its value."""
    args = dump(external=("mnt[/data]:data", "net[1]:n"), action_script="/run/script")
    assert [args[at + 1] for at, word in enumerate(args) if word == "--external"] == [
        "mnt[/data]:data",
        "net[1]:n",
    ]
    assert value(args, "--action-script") == "/run/script"
    args = restore(inherit_fds=((200, "pipe:[17]"), (201, "tmp/log")), external=("mnt[data]:/data",))
    pairs = [args[at + 1] for at, word in enumerate(args) if word == "--inherit-fd"]
    assert pairs == ["fd[200]:pipe:[17]", "fd[201]:tmp/log"]
    assert value(args, "--external") == "mnt[data]:/data"


def test_a_dump_of_a_container():
    """Each mount that is left out and the tree's freezer are options; without them CRIU is told of none."""
    args = dump(skip_mounts=("/run/nvidia/driver", "/a b"), freeze_cgroup="/sys/fs/cgroup/freezer/pod")
    assert [args[at + 1] for at, word in enumerate(args) if word == "--skip-mnt"] == [
        "/run/nvidia/driver",
        "/a b",
    ]
    assert value(args, "--freeze-cgroup") == "/sys/fs/cgroup/freezer/pod"
    assert not {"--skip-mnt", "--freeze-cgroup", "--root", "--mntns-compat-mode"} & set(dump())


def test_a_restore_into_a_container():
    """The root comes with the older way of making mounts; a restore on the machine has neither."""
    args = restore(root="/restores/1/root")
    assert value(args, "--root") == "/restores/1/root"
    assert "--mntns-compat-mode" in args
    assert not {"--root", "--mntns-compat-mode", "--skip-mnt", "--freeze-cgroup"} & set(restore())


def test_where_the_log_goes():
    """The log has a plain name, and the directory for it can be given."""
    assert value(dump_args(1, IMAGES, DUMP, work_dir=Path("/work")), "--work-dir") == "/work"
    assert value(restore_args(IMAGES, Path("p"), RESTORE, work_dir=Path("/work")), "--work-dir") == "/work"
    assert "--work-dir" not in dump() + restore()


def test_a_restore_can_stay_with_its_tree():
    """Without detaching, CRIU waits for the restored root."""
    assert "--restore-detached" not in restore_args(IMAGES, Path("p"), RESTORE, detach=False)
