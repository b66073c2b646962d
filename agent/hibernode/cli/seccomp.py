"""``seccomp``: the profile that blocks io_uring, put on, looked for and installed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import ClassVar, Final

import click

from hibernode.cli.common import PATH
from hibernode.cli.output import emit, output_option, table
from hibernode.errors import CheckFailedError, NotFoundError

_FILE_MODE: Final = 0o644
_NAMED_TASKS: Final = 10
_FILE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class _CommandNotFoundError(NotFoundError):
    """There is no such program; the code is the one that shells and ``env`` give."""

    exit_code: ClassVar[int] = 127
    default_reason = "CommandNotFound"


class _CommandNotExecutableError(NotFoundError):
    """The program is there but cannot be run; the code is the one that shells and ``env`` give."""

    exit_code: ClassVar[int] = 126
    default_reason = "CommandNotExecutable"


@click.group("seccomp")
def seccomp_command() -> None:
    """Run, check and install the profile that blocks io_uring."""


@seccomp_command.command("exec", context_settings={"allow_interspersed_args": False})
@click.option("--profile", type=PATH, help="Another profile (OCI JSON).")
@click.option("--allow-new-privileges", is_flag=True, help="Leave no_new_privs off; needs CAP_SYS_ADMIN.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def exec_command(profile: Path | None, command: tuple[str, ...], *, allow_new_privileges: bool) -> None:
    """Run COMMAND under the profile: same pid, and its exit code.

    127: there is no such program. 126: it cannot be run.
    """
    from hibernode.host.seccomp import exec_under
    from hibernode.host.seccomp_profile import BUILTIN_PROFILE, load_profile

    rules = load_profile(profile or BUILTIN_PROFILE)
    try:
        exec_under(rules, command, no_new_privs=not allow_new_privileges)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _CommandNotFoundError(f"{command[0]}: {error.strerror}", remedy="is it on PATH?") from error
    except OSError as error:
        raise _CommandNotExecutableError(
            f"{command[0]}: {error.strerror}",
            remedy="is it an executable program, and does the profile allow execve?",
        ) from error


@seccomp_command.command("check")
@click.argument("pid", type=click.IntRange(min=1))
@output_option
def check_command(pid: int, output: str) -> None:
    """Tell whether every task of the tree of PID is under a filter and none holds io_uring.

    What a filter denies cannot be read from outside; that one is on can.
    """
    from hibernode.host.seccomp import tree_state

    try:
        processes = tree_state(pid)
    except ProcessLookupError as error:
        raise NotFoundError(f"there is no process {pid}", remedy="name a running process") from error
    open_tasks = [tid for process in processes for tid in process.unfiltered]
    rings = [f"pid {process.pid} {ring}" for process in processes for ring in process.io_uring]
    data = {
        "pid": pid,
        "ok": not open_tasks and not rings,
        "processes": [
            {
                "pid": process.pid,
                "comm": process.comm,
                "tasks": [{"tid": tid, "mode": mode.name.lower()} for tid, mode in process.modes.items()],
                "ioUring": list(process.io_uring),
            }
            for process in processes
        ],
    }

    def render() -> str:
        rows = [
            (
                str(process.pid),
                process.comm,
                f"{len(process.modes) - len(process.unfiltered)} of {len(process.modes)}",
                ", ".join(process.io_uring) or "none",
            )
            for process in processes
        ]
        return table(rows, ("PID", "COMMAND", "TASKS UNDER A FILTER", "IO_URING"))

    emit("SeccompCheck", data, output, render)
    if rings:
        raise CheckFailedError(
            f"io_uring is in use: {', '.join(rings)}",
            remedy="start the program under the profile: hibernode seccomp exec -- CMD",
            reason="IoUring",
        )
    if open_tasks:
        more = ", ..." if open_tasks[_NAMED_TASKS:] else ""
        raise CheckFailedError(
            f"no seccomp filter on task {', '.join(map(str, open_tasks[:_NAMED_TASKS]))}{more}",
            remedy="start the program under the profile: hibernode seccomp exec -- CMD",
            reason="NoSeccompFilter",
        )


def _file_name(_ctx: click.Context, _param: click.Parameter, value: str) -> str:
    if not _FILE_NAME.fullmatch(value):
        raise click.BadParameter("a file name of letters, digits, '.', '_' and '-', no folder")
    return value


@seccomp_command.command("install")
@click.argument("directory", metavar="DIR", type=PATH)
@click.option(
    "--name", default="block-iouring.json", show_default=True, callback=_file_name, help="The file's name."
)
@output_option
def install_command(directory: Path, name: str, output: str) -> None:
    """Put the profile below DIR/profiles, where a kubelet finds it (DIR: /var/lib/kubelet/seccomp).

    The file is written as a whole or not at all; links below DIR are refused.
    """
    from hibernode.host.safefs import Dir
    from hibernode.host.seccomp_profile import BUILTIN_PROFILE, MAX_PROFILE_BYTES

    wanted = BUILTIN_PROFILE.read_bytes()
    with (
        Dir.open(directory, create=True, mode=0o755) as root,
        root.subdir("profiles", create=True, mode=0o755) as into,
    ):
        try:
            present = into.read(name, MAX_PROFILE_BYTES)
        except FileNotFoundError:
            state = "installed"
        else:
            same = present.data == wanted and present.stat.st_mode & 0o7777 == _FILE_MODE
            state = "unchanged" if same else "updated"
        if state != "unchanged":
            into.write_atomic(name, wanted, mode=_FILE_MODE)
    path = directory / "profiles" / name
    data = {"path": str(path), "state": state, "localhostProfile": f"profiles/{name}"}
    emit("SeccompInstall", data, output, lambda: f"{state} {path} (localhostProfile: profiles/{name})")


@seccomp_command.command("show")
def show_command() -> None:
    """Print the profile (OCI JSON)."""
    from hibernode.host.seccomp_profile import BUILTIN_PROFILE

    click.echo(BUILTIN_PROFILE.read_text(encoding="utf-8"), nl=False)
