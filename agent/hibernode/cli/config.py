"""``config``, ``version``, ``completion``: what needs nothing but the package."""

from __future__ import annotations

import platform

import click

from hibernode import __version__
from hibernode.cli.main import Context
from hibernode.cli.output import emit, output_option, table


@click.group("config")
def config_command() -> None:
    """Show the settings and where they come from."""


@config_command.command("show")
@output_option
@click.pass_obj
def show(context: Context, output: str) -> None:
    """Print the effective value of every setting and its source.

    Later sources win: defaults, the file (--config, HIBERNODE_CONFIG, /etc/hibernode/config.yaml),
    the environment (HIBERNODE_*, and the names that the eras' charts set), flags.
    """
    options = list(context.load().options())
    data = {
        "settings": [
            {
                "key": option.key,
                "value": option.value if isinstance(option.value, (int, float, bool)) else str(option.value),
                "source": option.source,
                "env": option.env,
                "description": option.description,
            }
            for option in options
        ]
    }

    def render() -> str:
        rows = [
            (o.key, str(o.value).lower() if isinstance(o.value, bool) else o.value, o.source) for o in options
        ]
        return table(rows, ("KEY", "VALUE", "SOURCE"), [[("# ", o.description)] for o in options])

    emit("Config", data, output, render)


@click.command("version")
@output_option
def version_command(output: str) -> None:
    """Print the version."""
    data = {
        "version": __version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "machine": platform.machine(),
    }
    emit("Version", data, output, lambda: f"hibernode {__version__} (Python {data['python']})")


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion_command(shell: str) -> None:
    """Print the completion script for SHELL.

    For bash: hibernode completion bash > /etc/bash_completion.d/hibernode
    """
    from click.shell_completion import get_completion_class

    from hibernode.cli.main import cli

    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(cli, {}, "hibernode", "_HIBERNODE_COMPLETE").source())
