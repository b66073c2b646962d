"""``placeholder``: what a restore pod runs, and how it gets there."""

from __future__ import annotations

import os
from pathlib import Path

import click

from hibernode.cli.common import PATH
from hibernode.cli.output import emit, output_option


@click.command("placeholder", context_settings={"allow_interspersed_args": False})
@click.option(
    "--wait", type=click.IntRange(0, 2_000_000), metavar="SECONDS", help="Start cold when no word has come."
)
@click.option(
    "--install",
    "directory",
    type=PATH,
    metavar="DIR",
    help="Run nothing; copy the program to DIR/hibernode-placeholder, for pods to mount.",
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@output_option
def placeholder_command(
    wait: int | None, directory: Path | None, command: tuple[str, ...], output: str
) -> None:
    """Wait to become the restored worker; run COMMAND if there will be none.

    A restore pod runs this: same pid, then the worker's signals and exit code. The program needs nothing of
    an image, no shell and no libc; with --install it comes from the node.
    """
    from hibernode.placeholder import find_placeholder, install_placeholder

    if directory is None:
        options = [] if wait is None else ["--wait", str(wait)]
        program = str(find_placeholder())
        os.execv(program, [program, *options, "--", *command])  # noqa: S606 - an argument list, no shell
    if command or wait is not None:
        raise click.UsageError("--install runs nothing: leave out COMMAND and --wait")
    path, state = install_placeholder(directory)
    emit("PlaceholderInstall", {"path": str(path), "state": state}, output, lambda: f"{state} {path}")
