"""What CRIU is asked for at a dump, by the settings and by what preflight has seen."""

from __future__ import annotations

from hibernode.criu import options
from hibernode.preflight import Preflight
from hibernode.settings import Settings


def dump_options(settings: Settings, checked: Preflight) -> options.DumpOptions:
    """Choose CRIU's options from the settings and what preflight has seen."""
    criu = settings.criu
    return options.DumpOptions(
        leave=settings.checkpoint.leave,
        shell_job=checked.shell_job,
        tcp=checked.tcp,
        file_locks=criu.file_locks,
        link_remap=criu.link_remap,
        ghost_limit_bytes=criu.ghost_limit_bytes,
        freeze_timeout_seconds=criu.freeze_timeout_seconds,
        log_level=criu.log_level,
    )
