"""``controller``: the controller of DynamoCheckpoint objects."""

from __future__ import annotations

import click

from hibernode.cli.main import Context


@click.command("controller")
@click.pass_obj
def controller_command(context: Context) -> None:
    """Run the controller of DynamoCheckpoint objects until SIGTERM.

    Makes a Job for each object, tells in its status how that ended, serves health and metrics. One of
    several such processes works at a time.
    """
    import asyncio

    from hibernode.controller.service import main
    from hibernode.logs import configure

    settings = context.load().settings
    configure(settings.log)
    asyncio.run(main(settings))
