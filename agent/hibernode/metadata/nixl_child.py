"""The program that loads one untrusted blob with NIXL, and may well die of it (``python -m``).

Reads the blob from standard input and writes one line of JSON. What is trusted happens first, with all
rights: imports, the plugin, the agent. Then every right is given up, and only then the blob is read.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from hibernode.host.seccomp import apply
from hibernode.host.seccomp_profile import load_profile

PACKAGES: Final = ("nixl_cu12", "nixl_cu13", "nixl")
"""The concrete packages first: the last only picks one of them, by the version of torch."""

_FILTER: Final = Path(__file__).resolve().parent.parent / "data" / "nixl-check.json"
_NOBODY: Final = 65534
_LIMITS: Final = {
    resource.RLIMIT_AS: 4 << 30,
    resource.RLIMIT_CORE: 0,
    resource.RLIMIT_FSIZE: 0,
    resource.RLIMIT_NOFILE: 256,
    resource.RLIMIT_NPROC: 0,
}


def main() -> None:
    """Load the blob and say what came of it; ``argv``: seconds after which to die in any case."""
    seconds = int(sys.argv[1])
    answers = os.dup(1)
    os.dup2(2, 1)  # UCX and some plugins print to standard output
    signal.alarm(seconds)  # should the agent that waits for us die first
    answer = _load(seconds)
    os.write(answers, json.dumps(answer).encode() + b"\n")
    os._exit(0)  # NIXL's destructors are of no use now, and may hang


def _load(seconds: int) -> dict[str, str]:
    name, api = _find()
    if api is None:
        return {"missing": "no package of " + ", ".join(PACKAGES) + " can be imported"}
    agent = api.nixl_agent(
        "hibernode-check", api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
    )
    version = metadata.version(name.replace("_", "-"))
    _confine(seconds)
    blob = sys.stdin.buffer.read()
    try:
        loaded = agent.add_remote_agent(blob)
    except Exception as error:  # noqa: BLE001 - NIXL's exceptions have no common base
        return {"refused": type(error).__name__, "version": version}
    text = loaded.decode("ascii", "backslashreplace") if isinstance(loaded, bytes) else str(loaded)
    return {"loaded": text, "version": version}


def _find() -> tuple[str, Any]:
    for name in PACKAGES:
        try:
            return name, importlib.import_module(f"{name}._api")
        except ImportError:
            continue
    return "", None


def _confine(seconds: int) -> None:
    """Give up the network, the file system, other processes and root, for good.

    The filter makes connect() say that it is under way. So NIXL finds every address reachable and goes on,
    and a blob of an agent that has ended loads as well as one of a living agent.
    """
    empty = Path(tempfile.mkdtemp(prefix="hibernode-check-"))
    os.chdir(empty)
    empty.rmdir()  # nothing can be made in a directory that has no name
    for limit, most in {**_LIMITS, resource.RLIMIT_CPU: seconds}.items():
        hard = resource.getrlimit(limit)[1]
        least = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(limit, (least, least))
    apply(load_profile(_FILTER))
    os.chroot(".")
    os.setgroups([])
    os.setresgid(_NOBODY, _NOBODY, _NOBODY)
    os.setresuid(_NOBODY, _NOBODY, _NOBODY)


if __name__ == "__main__":
    main()
