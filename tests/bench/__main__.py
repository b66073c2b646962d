"""``make bench``: every figure as median, extremes and count; bare criu and ours side by side in one run."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

from hibernode.criu.find import find_criu
from tests.bench import agent, containers, disk, gpu, metadata, pairs, stamp
from tests.bench.measure import Report, machine_facts

NAMES = ("disk", "64", "1024", "4096", "containers", "latency", "rest", "start", "flood", "gpu", "metadata")
ROUNDS = {64: 11, 1024: 9, 4096: 5}
QUICK_ROUNDS = {64: 2, 1024: 1}


def main() -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, no 4 GiB: does it all still run?")
    parser.add_argument("--only", default="", metavar="NAME,...", help=f"of: {', '.join(NAMES)}")
    parser.add_argument("--json", type=Path, default=Path("build/bench.json"), metavar="PATH")
    parser.add_argument(
        "--dir", type=Path, default=Path("/var/tmp"), help="a directory on the disk to measure"
    )
    args = parser.parse_args()
    wanted = args.only.split(",") if args.only else list(NAMES)
    if unknown := set(wanted) - set(NAMES):
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    if os.geteuid() != 0:
        parser.error("must run as root: it dumps and restores processes")

    base = Path(tempfile.mkdtemp(prefix="hibernode-bench-", dir=args.dir))
    try:
        criu = stamp.build(base)
        found = find_criu()
        report = Report(machine_facts(args.dir, f"{found.version}, {found.path}"), args.json)
        if "disk" in wanted:
            disk.floor(report, base, 256 if args.quick else 2048, 1 if args.quick else 3)
        for mib, rounds in (QUICK_ROUNDS if args.quick else ROUNDS).items():
            if str(mib) in wanted:
                pairs.measure(report, base, criu, mib, rounds)
        if "containers" in wanted:
            containers.measure(report, base, criu, 2 if args.quick else 11)
        if "latency" in wanted:
            agent.latency(report, base, criu, 10 if args.quick else 50)
        if "rest" in wanted:
            agent.rest(report, base, 3 if args.quick else 20)
        if "start" in wanted:
            agent.start_up(report, base, 3 if args.quick else 10)
        if "flood" in wanted:
            agent.flood(report, base, 1000 if args.quick else 10_000)
        if "gpu" in wanted:
            gpu.poll(report, base, 10 if args.quick else 100)
            gpu.quiesce(report, base, 3 if args.quick else 11)
        if "metadata" in wanted:
            metadata.measure(report, base, quick=args.quick)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    missed = [figure for figure in report.figures if figure.met is False]
    print(f"\n{len(report.figures)} figures in {args.json}; aims missed: {len(missed)}")
    for figure in missed:
        print(f"  {figure.name}: {figure.median:.4g} {figure.unit}, aim {figure.aim}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
