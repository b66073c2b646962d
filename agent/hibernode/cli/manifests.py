"""``manifests``: the Kubernetes objects that install all this."""

from __future__ import annotations

import json
import re

import click
import yaml

from hibernode.cli.main import Context
from hibernode.kube.objects import is_short_name

_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,511}", re.ASCII)


def _image(_ctx: click.Context, _param: click.Parameter, value: str) -> str:
    if value and not _IMAGE.fullmatch(value):
        raise click.BadParameter("an image's name, such as registry.example:5000/hibernode:0.1.0")
    return value


def _namespace(_ctx: click.Context, _param: click.Parameter, value: str) -> str:
    if not is_short_name(value):
        raise click.BadParameter("a name of up to 63 lower-case letters, digits and '-'")
    return value


@click.command("manifests")
@click.option("--overlay", "names", multiple=True, metavar="NAME", help="A variant; may be repeated.")
@click.option("--list", "listing", is_flag=True, help="Only list the overlays.")
@click.option(
    "-n",
    "--namespace",
    default="hibernode",
    show_default=True,
    callback=_namespace,
    help="Where the agent goes.",
)
@click.option("--image", default="", callback=_image, help="The image, where your registry has it.")
@click.option("--set", "pairs", multiple=True, metavar="KEY=VALUE", help="A setting; may be repeated.")
@click.option(
    "-o",
    "--output",
    type=click.Choice(["yaml", "json"]),
    default="yaml",
    show_default=True,
    help="How to print.",
)
@click.pass_obj
def manifests_command(
    context: Context,
    *,
    names: tuple[str, ...],
    namespace: str,
    image: str,
    pairs: tuple[str, ...],
    output: str,
    listing: bool,
) -> None:
    """Print the objects that install Hibernode, for ``kubectl apply -f -``.

    They are those of ``kubectl apply -k daemonset/``, with namespace, image and settings filled in.
    """
    from hibernode.manifests import manifests, overlays

    del context
    if listing:
        click.echo("\n".join(overlays()))
        return
    flags = []
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator:
            raise click.BadParameter(f"{pair!r} is not KEY=VALUE", param_hint="--set")
        flags.append((key, value))
    objects = manifests(names, namespace=namespace, image=image, flags=flags)
    if output == "json":
        click.echo(json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}, indent=2))
    else:
        click.echo(yaml.safe_dump_all(objects, sort_keys=False), nl=False)
