"""Kill -9 at every point of a publish: what stands under the final name is whole or absent, always.

A driver forks a child for each point. The child runs a publish and kills itself with SIGKILL at the n-th
line that it runs in store.py or staging.py; n goes up until the publish gets through. Each of these lines
changes at most one name on disk. After each kill the driver looks at what is there, then opens the store as
a new agent would and finishes the work.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

DRIVER = """
import json, os, shutil, signal, sys
from collections import Counter
from pathlib import Path

from hibernode.artifact import layout, staging, store, verify
from hibernode.artifact.store import Store
from hibernode.errors import NotFoundError
from hibernode.host import seccomp, seccomp_profile
from hibernode.host.safefs import Dir
from tests.unit.artifact_kit import ID, put, seal

base, kind = Path(sys.argv[1]), sys.argv[2]
if kind == "without exchange":
    # As on NFS: renameat2 with any flag is EINVAL. In the kernel, for this process and its children.
    rule = {
        "names": ["renameat2"], "action": "SCMP_ACT_ERRNO", "errnoRet": 22,
        "args": [{"index": 4, "value": 0, "op": "SCMP_CMP_NE"}],
    }
    profile = {"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [rule]}
    seccomp.apply(seccomp_profile.parse_profile(json.dumps(profile).encode()))

watched = {staging.__file__, store.__file__}


def die_at(point):
    left = point

    def line(frame, event, _):
        nonlocal left
        if event == "line":
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)
        return line

    sys.settrace(lambda frame, event, _: line if frame.f_code.co_filename in watched else None)


def publish(path, point):
    # In the child: everything before the publish happens untraced.
    store = Store(path).open()
    with store.stage(ID) as staging:
        seal(store, staging)
        (path.parent / "new").write_text(staging.uuid)
        die_at(point)
        store.publish(staging, ID)
        sys.settrace(None)
        os._exit(0)


def whole(path):
    # The uuid under the final name, without the store's help; None: absent.
    if not path.exists():
        return None
    with Dir.open(path) as top:
        manifest = layout.load_manifest(top, ID)
        problem = verify.first_problem(verify.check_tree(top, manifest, digests=True))
        assert not problem, problem
        return manifest.uuid


def round(number):
    path = base / "round" / "store"
    with Store(path).open() as store:
        old = None if kind == "first" else put(store).manifest.uuid
    child = os.fork()
    if not child:
        try:
            publish(path, number)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    killed = os.WIFSIGNALED(status)
    assert killed or os.waitstatus_to_exitcode(status) == 0, status
    new = (path.parent / "new").read_text()

    now = whole(path / ID)
    assert now in {None, old, new}, now
    if kind == "exchange":
        assert now is not None
    outcome = "absent" if now is None else "old" if now == old else "new"

    with Store(path).open() as store:  # the next agent
        assert now is None or store.get(ID).manifest.uuid == now
        if old:
            assert store.get(ID).manifest.uuid in {old, new}  # if it was absent it is back
            artifact = store.get(ID, old)
            assert all(verdict.ok for verdict in store.verify(artifact, digests=True))
        for staging in store.orphans():
            with staging:
                assert staging.published() == (now == new)
                store.publish(staging, ID)
                store.discard(staging)
        expected = [("complete", new), *([("previous", old)] if old else [])]
        assert [(str(info.state), info.uuid) for info in store.artifacts()] == expected
    shutil.rmtree(base / "round")
    return killed, outcome


outcomes = Counter()
number = 0
killed = True
while killed:
    number += 1
    killed, outcome = round(number)
    outcomes[outcome] += killed
print(json.dumps({"points": number - 1, **outcomes}))
"""


@pytest.fixture
def scratch() -> Iterator[Path]:
    """Make a directory in memory: a kill leaves there what it leaves on a disk, and syncs cost nothing."""
    with TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)


@pytest.mark.parametrize(
    ("kind", "seen"),
    [
        pytest.param("first", {"absent", "new"}, id="nothing stands there"),
        pytest.param("exchange", {"old", "new"}, id="an older one stands there"),
        pytest.param("without exchange", {"old", "absent", "new"}, id="an older one, as on NFS"),
    ],
)
def test_a_publish_killed_anywhere_leaves_the_name_whole_or_absent(scratch, kind, seen):
    """At each point the final name is whole or absent, the old artifact reachable, and the work can go on."""
    result = subprocess.run(
        [sys.executable, "-c", DRIVER, scratch, kind],
        cwd=Path(__file__).parent.parent.parent,
        stdout=subprocess.PIPE,
        check=True,
    )
    outcomes = json.loads(result.stdout)
    print(f"{kind}: {outcomes}")
    points = outcomes.pop("points")
    assert points >= 50
    assert {outcome for outcome, count in outcomes.items() if count} == seen
