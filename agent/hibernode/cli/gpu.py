"""``gpu``: the GPUs as nvidia-smi shows them, by UUID, with the pods that hold them."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any, Final

import click

from hibernode.cli.common import run_async
from hibernode.cli.main import Context
from hibernode.cli.output import FORMATS, age, emit, human_bytes, table
from hibernode.errors import AgentUnreachableError
from hibernode.text import printable

if TYPE_CHECKING:
    from hibernode.settings import Settings

NA: Final = "N/A"
GPUS: Final = ("GPU", "UUID", "NAME", "STATE", "MEMORY", "UTIL", "TEMP", "POWER", "ECC", "PCI")
PROCESSES: Final = (
    "GPU",
    "PID",
    "NAME",
    "KIND",
    "MEMORY",
    "NAMESPACE",
    "POD",
    "CONTAINER",
    "NOTE",
)
XIDS: Final = ("UUID", "XID", "COUNT", "LAST", "NOTE")
DAY: Final = 86400.0
CLEAR: Final = "\x1b[H\x1b[2J"
"""ECMA-48: cursor home, erase the page."""

CSV: Final = (
    ("uuid", "uuid"),
    ("index", "index"),
    ("pci.bus_id", "pciBusId"),
    ("name", "name"),
    ("state", "state"),
    ("memory.total [MiB]", "memoryTotalBytes"),
    ("memory.used [MiB]", "memoryUsedBytes"),
    ("memory.free [MiB]", "memoryFreeBytes"),
    ("utilization.gpu [%]", "utilizationGpuPercent"),
    ("utilization.memory [%]", "utilizationMemoryPercent"),
    ("temperature.gpu", "temperatureCelsius"),
    ("power.draw [W]", "powerWatts"),
    ("power.limit [W]", "powerLimitWatts"),
    ("clocks.sm [MHz]", "clockSmMhz"),
    ("clocks.mem [MHz]", "clockMemoryMhz"),
    ("ecc.errors.uncorrected.volatile.total", "eccVolatileUncorrected"),
    ("ecc.errors.uncorrected.aggregate.total", "eccAggregateUncorrected"),
    ("mig.mode.current", "migMode"),
    ("mig.parent", "parent"),
    ("processes", "processes"),
)
"""Columns: nvidia-smi's names for its ``--query-gpu``, and our fields."""


@click.command("gpu")
@click.option(
    "--watch",
    type=click.FloatRange(min=0.2, max=DAY),
    is_flag=False,
    flag_value=2.0,
    metavar="[SECONDS]",
    help="Show it again and again, every 2 s or as often as is said, until Ctrl-C.",
)
@click.option(
    "-o",
    "--output",
    type=click.Choice((*FORMATS, "csv")),
    default="table",
    show_default=True,
    help="A table for people, JSON or YAML, or a CSV line for each GPU and MIG instance.",
)
@click.pass_obj
def gpu_command(context: Context, watch: float | None, output: str) -> None:
    """Show the GPUs of this node and who holds them.

    A running agent is asked, for it alone has counted XIDs and the driver need not be asked twice; without
    one the driver is.
    """
    settings = context.load().settings
    while True:
        found = _look(settings)
        if watch is not None and output == "table" and sys.stdout.isatty():
            click.echo(CLEAR, nl=False)
        _show(found, output)
        if watch is None:
            return
        time.sleep(min(DAY, watch))  # in this order also for what is no number


def _show(found: dict[str, Any], output: str) -> None:
    if output == "csv":
        click.echo(_csv(found))
    else:
        emit("Gpus", found, output, lambda: _render(found))


def _look(settings: Settings) -> dict[str, Any]:
    from hibernode.client import NO_AGENT, AgentClient

    try:
        return AgentClient(settings.server.socket).get("/v1/gpu")
    except AgentUnreachableError as error:
        if error.reason != NO_AGENT:
            raise
    from hibernode.gpu.service import look_once
    from hibernode.gpu.state import as_json
    from hibernode.host.cgroups import see_whole

    see_whole()
    snapshot = run_async(lambda: look_once(settings.gpu))
    found: dict[str, Any] = as_json(snapshot)
    return found


# table ------------------------------------------------------------------------------------------------


def _render(found: dict[str, Any]) -> str:
    gpus = [row for gpu in found["gpus"] for row in _gpu_rows(gpu)]
    processes = [row for gpu in found["gpus"] for row in _process_rows(gpu)]
    xids = [_xid_row(each, found["fatalXids"]) for each in found["happened"] if each["event"] == "xid"]
    parts = [_head(found)]
    parts += [
        table(rows, heads) for rows, heads in ((gpus, GPUS), (processes, PROCESSES), (xids, XIDS)) if rows
    ]
    return "\n\n".join(parts)


def _xid_row(each: dict[str, Any], fatal: list[int]) -> tuple[object, ...]:
    note = "fatal" if each["code"] in fatal else ""
    return each["uuid"] or NA, each["code"], each["count"], age(each["last"]), note


def _head(found: dict[str, Any]) -> str:
    versions = found["versions"]
    if found["state"] in ("off", "absent", "starting"):
        return f"no NVML: {found['reason']}"
    shown = ", ".join(
        f"{name} {versions[key] or NA}"
        for name, key in (("driver", "driver"), ("CUDA", "cuda"), ("NVML", "nvml"))
    )
    if found["state"] == "up":
        return shown + (f"; {found['reason']}" if found["reason"] else "")
    stale = f", as it was {age(found['staleSince'])} ago" if found["gpus"] else ""
    return f"{shown}\nNVML is {found['state']}: {found['reason']}{stale}"


def _gpu_rows(gpu: dict[str, Any]) -> list[tuple[object, ...]]:
    """Lay out a GPU, and its MIG instances below it."""
    read = gpu["readings"]
    state = (
        gpu["state"] if gpu["state"] == "ok" else f"{gpu['state']} for {age(gpu['since'])}: {gpu['error']}"
    )
    rows: list[tuple[object, ...]] = [
        (
            gpu["index"],
            gpu["uuid"] or NA,
            gpu["name"] or NA,
            state,
            _memory(read),
            _unit(read["utilizationGpuPercent"], "%"),
            _unit(read["temperatureCelsius"], "C"),
            f"{_unit(read['powerWatts'], 'W')} / {_unit(read['powerLimitWatts'], 'W')}",
            _unit(read["eccVolatileUncorrected"], ""),
            gpu["pciBusId"] or NA,
        )
    ]
    for mig in gpu["instances"]:
        name = f"MIG {mig['profile'] or NA}"
        rows.append(("", mig["uuid"], name, gpu["state"], _memory(mig), NA, NA, NA, NA, ""))
    return rows


def _process_rows(gpu: dict[str, Any]) -> list[tuple[object, ...]]:
    if gpu["processes"] is None:
        why = gpu["readings"]["unavailable"].get("processes", "")
        return [(gpu["index"], NA, NA, NA, NA, "", "", "", f"no list of processes: {why}")]
    return [
        (
            each["instance"] or gpu["index"],
            each["pid"],
            each["owner"]["name"] or NA,
            "+".join(kind[0].upper() for kind in each["kinds"]),
            NA if each["memoryBytes"] is None else human_bytes(each["memoryBytes"]),
            each["owner"]["namespace"] or "",
            each["owner"]["pod"] or each["owner"]["podUid"],
            each["owner"]["container"] or each["owner"]["containerId"][:12],
            _note(each["owner"]),
        )
        for each in gpu["processes"]
    ]


def _note(owner: dict[str, Any]) -> str:
    if owner["kind"] == "node":
        return "on the node"
    return f"unknown: {owner['reason']}" if owner["kind"] == "unknown" else owner["reason"]


def _memory(read: dict[str, Any]) -> str:
    used, total = read["memoryUsedBytes"], read["memoryTotalBytes"]
    return " / ".join(NA if value is None else human_bytes(value) for value in (used, total))


def _unit(value: float | None, unit: str) -> str:
    return NA if value is None else f"{value:.0f}{unit}"


# CSV --------------------------------------------------------------------------------------------------


def _csv(found: dict[str, Any]) -> str:
    import csv
    import io

    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([head for head, _ in CSV])
    for gpu in found["gpus"]:
        count = NA if gpu["processes"] is None else len(gpu["processes"])
        parts = [{**gpu["readings"], **gpu, "processes": count, "parent": ""}]
        for mig in gpu["instances"]:
            held = NA
            if gpu["processes"] is not None:
                held = sum(each["instance"] == mig["uuid"] for each in gpu["processes"])
            same = {key: gpu[key] for key in ("index", "pciBusId", "state")}
            name = f"{gpu['name']} MIG {mig['profile'] or NA}"
            parts.append({**mig, **same, "name": name, "processes": held, "parent": gpu["uuid"]})
        for part in parts:
            writer.writerow([_csv_cell(head, part.get(key)) for head, key in CSV])
    return out.getvalue().rstrip("\n")


def _csv_cell(head: str, value: object) -> str:
    if value is None:
        return NA
    if isinstance(value, bool):
        return "Enabled" if value else "Disabled"
    if "[MiB]" in head and isinstance(value, int):
        return str(value >> 20)
    return printable(str(value), keep="")
