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
    from hibernode.kube.objects import is_name, metadata_of

    settings = context.load().settings
    raw = config_file.read(file, names.KIND)
    if raw.get("kind") != names.KIND or not is_name(metadata_of(raw).get("name")):
        raise UsageError(
            f"{file} holds no {names.KIND} with a name that Kubernetes takes",
            remedy="give one object to a file",
        )
    spec = raw.get("spec")
    id_ = identity_hash(
        spec.get("identity") if isinstance(spec, dict) else None, settings.controller.hash_length
    )
    try:
        # As the API server would have it: each name of a field is text.
        job = json.loads(json.dumps(build_job(raw, id_, JobOptions.of(settings)), allow_nan=False))
    except ValueError:
        raise UsageError(f"{file} holds a number that JSON has not", remedy="write it in digits") from None
    if output == "json":
        click.echo(json.dumps(job, indent=2))
    else:
        click.echo(yaml.safe_dump(job, sort_keys=False, width=110), nl=False)
