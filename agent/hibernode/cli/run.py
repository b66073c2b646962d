"""``run``: the node agent."""

from __future__ import annotations

import click

from hibernode.cli.main import Context


@click.command("run")
@click.pass_obj
def run_command(context: Context) -> None:
    """Run the node agent until SIGTERM.

    Watches the signal directory, dumps and restores workers, answers them, serves health and metrics.
    """
    import asyncio

    from hibernode.daemon import Agent
    from hibernode.host.cgroups import see_whole
    from hibernode.host.malloc import limit_malloc
    from hibernode.logs import configure

    settings = context.load().settings
    configure(settings.log)
    limit_malloc()
    see_whole()
    asyncio.run(Agent.main(settings))
