"""``job``: what the controller would make, without a cluster."""

from __future__ import annotations

import json
from pathlib import Path

import click

from hibernode.cli.common import PATH
from hibernode.cli.main import Context
from hibernode.errors import UsageError


@click.group("job")
def job_command() -> None:
    """Show the Job that a DynamoCheckpoint becomes."""


@job_command.command("render")
@click.argument("file", type=PATH)
@click.option("-o", "--output", type=click.Choice(["yaml", "json"]), default="yaml", help="How to print it.")
@click.pass_obj
def render(context: Context, file: Path, output: str) -> None:
    """Print the Job for the DynamoCheckpoint in FILE (YAML or JSON), by the settings controller.*.

    Nothing is asked of a cluster; the uid of the owner is empty unless FILE has one.
    """
    import yaml

    from hibernode import config_file
    from hibernode.controller.identity import identity_hash
    from hibernode.controller.job import JobOptions, build_job
    from hibernode.kube import names
    from hibernode.kube.objects import metadata_of

    settings = context.load().settings
    raw = config_file.read(file)
    if raw.get("kind") != names.KIND or not isinstance(metadata_of(raw).get("name"), str):
        raise UsageError(f"{file} holds no {names.KIND} with a name", remedy="give one object to a file")
    spec = raw.get("spec")
    id_ = identity_hash(
        spec.get("identity") if isinstance(spec, dict) else None, settings.controller.hash_length
    )
    job = build_job(raw, id_, JobOptions.of(settings))
    if output == "json":
        click.echo(json.dumps(job, indent=2))
    else:
        click.echo(yaml.safe_dump(job, sort_keys=False, width=110), nl=False)
