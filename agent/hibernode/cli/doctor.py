"""``doctor``: is this machine fit, and if not, what is to be done."""

from __future__ import annotations

import click

from hibernode.cli.common import failed, finding_data, finding_table, open_process, run_async
from hibernode.cli.main import Context
from hibernode.cli.output import emit, output_option
from hibernode.errors import HibernodeError
from hibernode.workload import Finding, Verdict


@click.command("doctor")
@click.option("--pid", type=click.IntRange(min=2), help="Also check whether this process could be dumped.")
@output_option
@click.pass_obj
def doctor_command(context: Context, pid: int | None, output: str) -> None:
    """Check this machine and change nothing; exit 1 if a check fails.

    Where the settings say that nothing is dumped here only the GPUs are looked at.
    """
    from importlib.resources import files

    from hibernode.cri_checks import cri_findings
    from hibernode.criu.runner import Criu, find_criu
    from hibernode.gpu.checks import findings as gpu_findings
    from hibernode.gpu.preflight import doctor_finding, look_at
    from hibernode.gpu.service import look_once
    from hibernode.host.cgroups import see_whole
    from hibernode.preflight import host_findings, preflight

    see_whole()
    settings = context.load().settings
    findings: list[Finding] = []
    criu: Criu | None = None
    serves = settings.checkpoint.enabled
    if serves or pid is not None:
        try:
            criu = find_criu(settings.criu.binary)
        except HibernodeError as error:
            findings.append(
                Finding("criu.found", Verdict.FAIL, ">= 4.2", error.message, error.remedy, error.reason)
            )
    if serves:
        profile = files("hibernode").joinpath("data/block-iouring.json").read_bytes()
        findings += host_findings(settings, criu, shipped_profile=profile)
        findings += cri_findings(settings.runtime.socket)
    else:
        findings.append(
            Finding("host.checkpoints", Verdict.SKIP, "what dumps need", "checkpoint.enabled is false")
        )
    snapshot = run_async(lambda: look_once(settings.gpu))
    findings += [*gpu_findings(snapshot), *(doctor_finding(snapshot, settings.gpu) if serves else ())]
    if pid is not None:
        with open_process(pid) as process:
            checked = preflight(process, settings, criu, settings.store.path)
            on_gpu = run_async(lambda: look_at(checked.facts, settings, snapshot))
            findings += [*checked.findings, *on_gpu.findings]
    counts = {verdict: sum(f.verdict is verdict for f in findings) for verdict in Verdict}
    summary = ", ".join(f"{count} {verdict.value}" for verdict, count in counts.items() if count)
    emit(
        "Doctor",
        {"findings": finding_data(findings), "summary": {v.value: n for v, n in counts.items()}},
        output,
        lambda: f"{finding_table(findings)}\n\n{summary}",
    )
    if failed(findings):
        raise click.exceptions.Exit(1)
