"""The main job in a real one-node cluster: DaemonSet, controller, checkpoint Job, restore pod.

Everything runs on this machine and nothing stays: API server, kubelet and containerd are the tests' own.
Prints what each part took and what the machine was before and after; the last line starts with ``demo ok``
or ``demo failed``.
"""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

from tests.cluster.node import hierarchies, one_node, read_sysctls
from tests.cluster.story import Story

FOREIGN = re.compile(r"[0-9a-f]{8}|/pytest-")
"""What other runs of the tests make on this machine: it bears their tokens, as ours does ours."""


def say(text: str) -> None:
    """Print lines at once."""
    print(text.rstrip(), flush=True)


def output(*command: str) -> str:
    """Give what a program prints, or nothing where there is no such program."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout
    except FileNotFoundError:
        return ""


def machine() -> dict[str, set[str]]:
    """Note what a cluster could leave behind on this machine."""
    cgroups = {str(path) for top in hierarchies() for path in top.glob("*/") if path.is_dir()}
    mounts = {line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()}
    rules = {line for line in output("iptables-save").splitlines() if not line.startswith(("#", ":"))}
    folders = ("/var/lib/hibernode", "/run/hibernode", "/opt/hibernode-pods", "/var/lib/dynamo-checkpoint")
    return {
        "cgroups": cgroups,
        "sysctls": {f"{name}={value}" for name, value in read_sysctls().items()},
        "mounts": mounts,
        "interfaces": {path.name for path in Path("/sys/class/net").iterdir()},
        "iptables": rules,
        "nftables": set(output("nft", "list", "tables").splitlines()),
        "directories": {
            folder for folder in (*folders, "/var/lib/kubelet", "/var/log/pods") if Path(folder).exists()
        },
    }


def interrupted(number: int, _frame: FrameType | None) -> None:
    """Let a signal unwind as Ctrl-C does."""
    raise KeyboardInterrupt(signal.Signals(number).name)


def main() -> int:
    """Run the demo; whatever happens, the cluster goes, and the machine is compared."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=256, help="size of the worker's data")
    parser.add_argument("--wait", action="store_true", help="keep the cluster until Ctrl-C, for a look")
    args = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # SIGINT too: a shell may have it ignored
        signal.signal(number, interrupted)
    before, last, code, token = machine(), "", 1, "none"
    began = time.monotonic()
    try:
        with one_node() as cluster:
            token = cluster.kit.token
            say(f"a cluster of one node is Ready after {cluster.start_seconds:.1f} s")
            last = f"demo ok: {Story(cluster, say, args.mib).run()}"
            code = 0
            if args.wait:
                say(f"KUBECONFIG={cluster.kube.admin} kubectl get pods -A; Ctrl-C ends it")
                signal.pause()
    except KeyboardInterrupt as reason:
        last = last if code == 0 else f"demo failed: interrupted by {reason or 'SIGINT'}"
    except AssertionError as failure:
        code, last = 1, f"demo failed: {failure}"
    after = machine()
    changed = {
        name: sorted(each for each in was ^ after[name] if not FOREIGN.search(each) or token in each)
        for name, was in before.items()
    }
    changed = {name: found for name, found in changed.items() if found}
    for name, found in changed.items():
        say(f"{name} changed: {', '.join(found)}")
    if not changed:
        counts = ", ".join(f"{len(found)} {name}" for name, found in before.items())
        say(f"the machine is as it was: {counts}")
    say(f"{last} ({time.monotonic() - began:.0f} s in all)")
    return 1 if changed else code


if __name__ == "__main__":
    sys.exit(main())
