"""The compatibility gate: every row, both values, and what strict makes of them."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from typing import Any

import pytest

from hibernode.compat import SHOWN, FileFacts, HostFacts, compatibility, cpu_features, host_facts, strictly
from hibernode.workload import Finding, Verdict
from tests.unit.artifact_kit import manifest

HOST = HostFacts(
    machine="x86_64",
    kernel="6.18.5",
    cpu_features=frozenset({"avx2", "sse4_2", "more"}),
    criu_version="4.2.1",
    tasks={},
    files={"/usr/bin/python3": FileFacts(1, -1)},
    mem_available_bytes=1 << 40,
)
ROWS = [
    "restore.architecture",
    "restore.kernel",
    "restore.cpu",
    "restore.criu",
    "restore.files",
    "restore.pids",
    "restore.memory",
]


def rows_of(
    image: dict[str, Any] | None = None, host: dict[str, Any] | None = None, *, strict: bool = False
) -> dict[str, Finding]:
    """Run the gate on a good pair with changes."""
    found = compatibility(manifest(**(image or {})), dataclasses.replace(HOST, **(host or {})))
    found = strictly(found) if strict else found
    rows = {row.check: row for row in found}
    assert len(rows) == len(found)
    return rows


def mapped(path: str, *, size: int = 1, mtime_ns: int = -1, size_checked: bool = True) -> dict[str, Any]:
    """Build a mapped file of a manifest."""
    return {
        "path": path,
        "size": size,
        "mtime_ns": mtime_ns,
        "dev": 2,
        "ino": 3,
        "size_checked": size_checked,
    }


@pytest.mark.parametrize("strict", [False, True], ids=["as a rule", "with strict"])
def test_the_machine_that_dumped_can_restore(strict: bool) -> None:
    """On an unchanged machine every row is ok, has both values and no remedy."""
    rows = rows_of(strict=strict)
    assert list(rows) == ROWS
    for row in rows.values():
        assert row.verdict is Verdict.OK
        assert row.expected
        assert row.found
        assert (row.remedy, row.reason) == ("", "")


CASES = [
    pytest.param(
        {}, {"machine": "aarch64"}, "architecture", "fail", ("x86_64", "aarch64"), id="another architecture"
    ),
    pytest.param(
        {},
        {"kernel": "6.18.9-cloud"},
        "kernel",
        "ok",
        ("6.18.5", "6.18.9-cloud"),
        id="another kernel of the series",
    ),
    pytest.param(
        {}, {"kernel": "6.1.5"}, "kernel", "warn", ("6.18.5", "6.1.5"), id="another series of kernels"
    ),
    pytest.param(
        {"kernel": "5.10"},
        {"kernel": "weird"},
        "kernel",
        "warn",
        ("5.10", "weird"),
        id="a kernel release of no known form",
    ),
    pytest.param(
        {},
        {"cpu_features": frozenset({"sse4_2"})},
        "cpu",
        "fail",
        ("avx2", "missing"),
        id="a CPU without a feature",
    ),
    pytest.param(
        {"cpu_features": []}, {}, "cpu", "skip", ("known", "not readable"), id="an image without CPU features"
    ),
    pytest.param(
        {},
        {"cpu_features": frozenset()},
        "cpu",
        "skip",
        ("known", "not readable"),
        id="a host without CPU features",
    ),
    pytest.param(
        {},
        {"criu_version": "4.10"},
        "criu",
        "ok",
        (">= 4.2.1", "4.10"),
        id="a newer CRIU, compared as numbers",
    ),
    pytest.param(
        {"criu": {"version": "4.2.0"}},
        {"criu_version": "4.2"},
        "criu",
        "ok",
        ("4.2.0", "4.2"),
        id="4.2 is 4.2.0",
    ),
    pytest.param({}, {"criu_version": "4.2"}, "criu", "fail", (">= 4.2.1", "4.2"), id="an older CRIU"),
    pytest.param({}, {"criu_version": ""}, "criu", "skip", ("4.2.1", ""), id="a CRIU of unknown version"),
    pytest.param(
        {"criu": {"version": "4.2-dev"}},
        {},
        "criu",
        "skip",
        ("4.2-dev", "4.2.1"),
        id="an image of a development CRIU",
    ),
    pytest.param(
        {},
        {"files": {}},
        "files",
        "fail",
        ("1 files", "missing: /usr/bin/python3"),
        id="a file that nobody looked at",
    ),
    pytest.param(
        {},
        {"files": {"/usr/bin/python3": None}},
        "files",
        "fail",
        ("1 files", "missing: /usr/bin/python3"),
        id="a missing file",
    ),
    pytest.param(
        {},
        {"files": {"/usr/bin/python3": FileFacts(9, -1)}},
        "files",
        "fail",
        ("as they were", "(1 then, 9 now)"),
        id="a file of another size",
    ),
    pytest.param(
        {},
        {"files": {"/usr/bin/python3": FileFacts(1, 5)}},
        "files_mtime",
        "warn",
        ("unchanged", "/usr/bin/python3"),
        id="a file with another mtime",
    ),
    pytest.param(
        {"mapped_files": [mapped("/log", size_checked=False)]},
        {"files": {"/log": FileFacts(9, 9)}},
        "files",
        "ok",
        ("1 files", "all there"),
        id="a log that has grown and that CRIU does not check",
    ),
    pytest.param(
        {}, {"tasks": {101: "bash"}}, "pids", "fail", ("2 pids", "101 (bash)"), id="a thread's id in use"
    ),
    pytest.param({}, {"tasks": {999: "bash"}}, "pids", "ok", ("2 pids", "free"), id="other ids in use"),
    pytest.param(
        {}, {"mem_available_bytes": 10}, "memory", "warn", ("bytes available", "10 bytes"), id="little memory"
    ),
]


@pytest.mark.parametrize(("image", "host", "check", "verdict", "values"), CASES)
def test_a_row_says_what_it_compared(
    image: dict[str, Any], host: dict[str, Any], check: str, verdict: str, values: tuple[str, str]
) -> None:
    """Each row has its verdict, both values, and a remedy unless it is ok; only failures have a reason."""
    row = rows_of(image, host)[f"restore.{check}"]
    assert row.verdict == verdict
    assert values[0] in row.expected
    assert values[1] in row.found
    assert bool(row.remedy) == (verdict != "ok")
    assert bool(row.reason) == (verdict == "fail")


@pytest.mark.parametrize(("image", "host", "check", "verdict", "values"), CASES)
def test_strict_leaves_nothing_open(
    image: dict[str, Any], host: dict[str, Any], check: str, verdict: str, values: tuple[str, str]
) -> None:
    """With strict a warning or a skip is a failure with a reason; the values stay as they are."""
    loose, strict = rows_of(image, host), rows_of(image, host, strict=True)
    assert set(loose) == set(strict)
    row = strict[f"restore.{check}"]
    assert row.verdict == ("ok" if verdict == "ok" else "fail")
    assert bool(row.reason) == (verdict != "ok")
    assert {row.verdict for row in strict.values()} <= {Verdict.OK, Verdict.FAIL}
    for name, row in loose.items():
        assert (row.expected, row.found, row.remedy) == (
            strict[name].expected,
            strict[name].found,
            strict[name].remedy,
        )


def test_a_taken_pid_has_a_reason_of_its_own() -> None:
    """FC-08: an id in use is told from other mismatches by its reason, with strict and without."""
    for strict in (False, True):
        row = rows_of({}, {"tasks": {100: "bash"}}, strict=strict)["restore.pids"]
        assert (row.verdict, row.reason) == (Verdict.FAIL, "PidInUse")


MANY = SHOWN + 3


@pytest.mark.parametrize(
    ("image", "host", "check", "cut"),
    [
        pytest.param(
            {"mapped_files": [mapped(f"/f{n:02}") for n in range(MANY)]},
            {"files": {}},
            "files",
            "and 3 more",
            id="missing files",
        ),
        pytest.param(
            {"mapped_files": [mapped(f"/f{n:02}") for n in range(MANY)]},
            {"files": {f"/f{n:02}": FileFacts(2, 2) for n in range(MANY)}},
            "files",
            "and 3 more",
            id="files of another size",
        ),
        pytest.param(
            {"mapped_files": [mapped(f"/f{n:02}") for n in range(MANY)]},
            {"files": {f"/f{n:02}": FileFacts(1, 2) for n in range(MANY)}},
            "files_mtime",
            "and 3 more",
            id="files with another mtime",
        ),
        pytest.param(
            {"cpu_features": [f"f{n:02}" for n in range(MANY)]}, {}, "cpu", "...", id="missing CPU features"
        ),
        pytest.param(
            {
                "tree": [
                    {
                        "pid": 100,
                        "ppid": 1,
                        "pgid": 100,
                        "sid": 100,
                        "threads": list(range(100, 100 + MANY)),
                        "comm": "w",
                    }
                ]
            },
            {"tasks": dict.fromkeys(range(100, 100 + MANY), "x")},
            "pids",
            "and 3 more",
            id="ids in use",
        ),
    ],
)
def test_a_long_list_is_cut(image: dict[str, Any], host: dict[str, Any], check: str, cut: str) -> None:
    """A row names the first few items of a long list and says how many more there are."""
    row = rows_of(image, host)[f"restore.{check}"]
    text = f"{row.expected} {row.found}"
    assert cut in text
    shown = sum(name in text for n in range(MANY) for name in (f"/f{n:02}", f" f{n:02}", f" {100 + n} ("))
    assert shown == SHOWN


def test_a_missing_and_a_resized_file_are_both_named() -> None:
    """One row names what is missing and what has another size."""
    row = rows_of({"mapped_files": [mapped("/a"), mapped("/b")]}, {"files": {"/b": FileFacts(2, 2)}})[
        "restore.files"
    ]
    assert row.found == "missing: /a; size differs: /b (1 then, 2 now)"


def test_the_machine_is_asked_about_this_process() -> None:
    """FC-08: running tasks count as taken, free ids do not; files are looked at as they are now."""
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True
    ) as child:
        tree = [
            {"pid": child.pid, "ppid": 1, "pgid": 1, "sid": 1, "threads": [child.pid, 1 << 22], "comm": "w"}
        ]
        facts = host_facts(
            manifest(tree=tree, mapped_files=[mapped(__file__), mapped("/no/such\0file")]), "4.2"
        )
        child.communicate(b"\n")
    assert set(facts.tasks) == {child.pid}
    stat = os.stat(__file__)
    assert facts.files == {__file__: FileFacts(stat.st_size, stat.st_mtime_ns), "/no/such\0file": None}
    assert facts.machine == os.uname().machine
    assert facts.criu_version == "4.2"
    assert facts.mem_available_bytes > 0
    assert facts.cpu_features == set(cpu_features()) != set()


@pytest.mark.parametrize(
    ("call", "what"),
    [
        pytest.param("os.setpgid(0, 0)", "session", id="a session"),
        pytest.param("pass", "group", id="a process group"),
    ],
)
def test_a_number_outlives_the_process_that_had_it_first(call: str, what: str) -> None:
    """FC-08: the id of an ended process is not free while a session or a group still has it."""
    script = f"import os, sys\nif os.fork(): os._exit(0)\n{call}\nos.write(1, b'x')\nsys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as leader:
        assert leader.stdin is not None
        assert leader.stdout is not None
        assert leader.stdout.read(1) == b"x"
        leader.wait()
        tree = [{"pid": leader.pid, "ppid": 1, "pgid": 1, "sid": 1, "threads": [leader.pid], "comm": "w"}]
        facts = host_facts(manifest(tree=tree), "4.2")
        leader.stdin.close()
    assert facts.tasks[leader.pid].startswith(f"{what} of pid ")
