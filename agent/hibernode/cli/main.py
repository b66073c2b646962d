"""The entry point: global flags, lazy commands, errors as sentences and exit codes."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

import click

from hibernode import __version__
from hibernode.config import Loaded, load
from hibernode.errors import HibernodeError
from hibernode.text import printable

COMMANDS: Final = {
    "run": ("run", "Run the node agent"),
    "checkpoint": ("checkpoint", "Freeze a process into a checkpoint"),
    "restore": ("restore", "Bring a checkpoint back to life"),
    "list": ("store", "List the checkpoints in the store"),
    "inspect": ("store", "Show all about one checkpoint"),
    "verify": ("store", "Check the files of checkpoints against their digests"),
    "gc": ("gc", "Remove what the retention rules let go"),
    "pin": ("store", "Keep a checkpoint whatever the retention rules say"),
    "unpin": ("store", "Let the retention rules apply again"),
    "logs": ("logs", "Show CRIU's log of a dump or a restore, errors picked out"),
    "explain": ("logs", "Name the cause in a CRIU log"),
    "events": ("agent", "Show what the agent did"),
    "status": ("agent", "Show what the agent is doing"),
    "gpu": ("gpu", "Show the GPUs, and which pods hold them"),
    "metadata": ("metadata", "Look at the metadata records that workers get, and check them"),
    "retry": ("agent", "Forget the failed attempts on an id"),
    "doctor": ("doctor", "Check this machine, change nothing"),
    "controller": ("controller", "Run the controller of DynamoCheckpoint objects"),
    "job": ("job", "Show the Job that a DynamoCheckpoint becomes"),
    "seccomp": ("seccomp", "The profile that blocks io_uring"),
    "placeholder": ("placeholder", "What a restore pod runs: waits to become the restored worker"),
    "manifests": ("manifests", "Print the Kubernetes objects that install all this"),
    "config": ("config", "Show the settings and where they come from"),
    "version": ("config", "Print the version"),
    "completion": ("config", "Print the shell completion script"),
}
"""Command name to (module, short help): help is printed without importing any of them."""


class Lazy(click.Group):
    """A group whose commands are imported when they are used."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; when the reader of its output (head, less) has gone, end as SIGPIPE would."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            # Python would complain once more when it flushes at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(128 + signal.SIGPIPE)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """List the names in the table's order."""
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the module of ``cmd_name`` and take the command out of it."""
        del ctx
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"hibernode.cli.{COMMANDS[cmd_name][0]}")
        command: click.Command = getattr(module, f"{cmd_name}_command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the table without importing the commands."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


def _split(_ctx: click.Context, _param: click.Parameter, value: tuple[str, ...]) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for item in value:
        key, separator, text = item.partition("=")
        if not separator:
            raise click.BadParameter(f"{item!r} is not KEY=VALUE")
        pairs.append((key, text))
    return pairs


class Context:
    """What the global flags say; the settings are read when a command asks for them."""

    def __init__(self) -> None:
        self.debug = False
        self._file: Path | None = None
        self._flags: list[tuple[str, str]] = []

    def take(self, params: Mapping[str, Any]) -> None:
        """Take over the global flags as click has parsed them."""
        self.debug = params.get("debug") or False
        self._file = params.get("file")
        short = [("store.path", params.get("store")), ("signals.path", params.get("signals"))]
        self._flags = [
            *(params.get("flags") or ()),
            *((key, text) for key, text in short if text is not None),
        ]

    def load(self, more: Sequence[tuple[str, str]] = ()) -> Loaded:
        """Read the settings; ``more`` are the command's own flags, the strongest.

        :raises UsageError: a key or a value is not acceptable.
        """
        return load(file=self._file, flags=[*self._flags, *more])


@click.group(cls=Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="hibernode")
@click.option("--config", "file", type=click.Path(path_type=Path), help="Settings file (YAML).")
@click.option(
    "--set",
    "flags",
    multiple=True,
    callback=_split,
    metavar="KEY=VALUE",
    help="One setting; may be repeated.",
)
@click.option("--store", type=str, help="Short for --set store.path=DIR.")
@click.option("--signals", type=str, help="Short for --set signals.path=DIR.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.pass_context
def cli(ctx: click.Context, /, **params: Any) -> None:
    """Freeze warmed-up workers into checkpoints, thaw them in seconds.

    Exit codes: 0 ok, 1 a check failed or not found, 2 usage, 3 agent unreachable, 4 incompatible or
    refused, 5 input/output or integrity, 128 + N ended by signal N.
    """
    ctx.ensure_object(Context).take(params)


def main(argv: list[str] | None = None) -> None:
    """Run the command and exit with its documented code."""
    context = Context()
    try:
        code = cli.main(args=argv, prog_name="hibernode", standalone_mode=False, obj=context)
    except click.Abort:
        _fail("interrupted", "", 130)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except click.ClickException as error:
        where = getattr(error, "ctx", None)
        usage = f"'{where.command_path} --help' shows what is possible" if where else ""
        _fail(" ".join(error.format_message().split()), usage, error.exit_code)
    except (HibernodeError, OSError) as error:
        if context.debug:
            traceback.print_exc()
        _fail(*_sentence(error))
    sys.exit(code if isinstance(code, int) else 0)


def _sentence(error: HibernodeError | OSError) -> tuple[str, str, int]:
    """Say what, what to do, and the exit code."""
    if isinstance(error, HibernodeError):
        return error.message, error.remedy, error.exit_code
    named = os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else ""
    what = ": ".join(filter(None, (named, error.strerror or str(error) or type(error).__name__)))
    remedy = "hibernode needs root for this" if isinstance(error, PermissionError) else "--debug shows where"
    return what, remedy, 5


def _fail(message: str, remedy: str, code: int) -> NoReturn:
    click.echo(f"hibernode: {printable(message, keep='')}", err=True)
    for line in remedy.splitlines():
        click.echo(f"  {printable(line, keep='')}", err=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
