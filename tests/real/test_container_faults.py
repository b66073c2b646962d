"""Freezing and thawing containers goes wrong: each fault is named, and leaves the container as it was."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hibernode.artifact.manifest import Manifest, manifest_bytes, parse_manifest
from hibernode.criu.moment import is_safe
from hibernode.criu.runner import find_criu
from tests.real.boxes import Box, Kit
from tests.real.fakes import FakeCriu, small_tmpfs
from tests.real.node import HIBERNODE, Node, read_json, state_letter, until
from tests.real.places import (
    MIB,
    Place,
    children,
    descendants,
    differences,
    freezer_states,
    placed,
    processes_with,
    refused,
    snapshot,
)
from tests.real.test_kill_matrix import DUMP_MOMENTS, RESTORE_MOMENTS, killer

pytestmark = [pytest.mark.containers, pytest.mark.criu]

SILENT = {"DYN_CHECKPOINT_SIGNAL_FILE": ""}
"""A worker that is told nothing, so that a dump that fails does not end it."""

CORRUPT = 5
INCOMPATIBLE = 4


@dataclass(frozen=True)
class Frozen:
    """A worker that was dumped once for all tests here: the store with it, and a directory it had mounted."""

    id: str
    store: Path
    models: Path

    @property
    def binds(self) -> list[tuple[Path, str, str]]:
        """The mount that a worker has beyond the usual ones."""
        return [(self.models, "/models", "ro")]


@pytest.fixture(scope="module")
def frozen(kit: Kit) -> Iterator[Frozen]:
    """Dump a static worker in a busybox image."""
    base = Path(tempfile.mkdtemp(prefix="hibernode-test-"))
    node = Node(base)
    models = base / "models"
    models.mkdir()
    try:
        with placed(node, kit, "runc", "busybox") as place:
            here = Frozen(node.new_id(), node.store, models)
            box = place.start(here.id, more_binds=here.binds)
            box.counts_on()
            place.freeze(box)
            yield here
    finally:
        node.close()
        shutil.rmtree(base, ignore_errors=True)


@pytest.fixture
def place(node: Node, kit: Kit) -> Iterator[Place]:
    """Give a place for busybox boxes with runc."""
    with placed(node, kit, "runc", "busybox") as here:
        yield here


@pytest.fixture
def artifact(node: Node, frozen: Frozen) -> Path:
    """Give the node a copy of the dumped worker; the test may spoil it."""
    node.store.mkdir(mode=0o700)
    copy = node.store / frozen.id
    shutil.copytree(frozen.store / frozen.id, copy)
    return copy


@pytest.fixture
def waiting(place: Place, frozen: Frozen) -> Box:
    """Give a placeholder for it."""
    return place.placeholder(frozen.id, more_binds=frozen.binds)


@contextmanager
def untouched(node: Node, box: Box) -> Iterator[None]:
    """See that nothing of a waiting container is another after the block, and that no helper is left."""
    before = snapshot(box)
    yield
    same_as(before, node, box)


def same_as(before: dict[str, object], node: Node, box: Box) -> None:
    """Compare a container with what it was; its init may take a moment to reap what was ended."""

    def same() -> bool:
        seen.clear()
        seen.update(differences(before, snapshot(box)))
        seen["helpers"] = helpers(node)
        return seen == {"helpers": []}

    seen: dict[str, object] = {}
    try:
        until("container as it was", same, seconds=3)
    except AssertionError:
        raise AssertionError(seen) from None


def helpers(node: Node) -> list[str]:
    """List what works for a node, its agents left out."""
    return [line for line in processes_with(str(node.base)) if "hibernode run" not in line]


def thaws_after_all(place: Place, frozen: Frozen, box: Box, **settings: str) -> None:
    """See that the container is still good for the worker."""
    place.thaw(frozen.id, box, STORE_PATH=str(frozen.store), **settings)
    assert box.counts_on()["restored"] is True
    box.ask_exit(11)
    assert box.wait() == 11


def edit(artifact: Path, **changes: Any) -> Manifest:
    """Change fields of a manifest, as a forger would."""
    path = artifact / "manifest.json"
    manifest = parse_manifest(path.read_bytes()).model_copy(update=changes)
    path.write_bytes(manifest_bytes(manifest))
    return manifest


# a restore that is refused --------------------------------------------------------------------------------

CRIU_VERSION = find_criu("").version
FACTS = {
    "architecture": ({"machine": "riscv64"}, ("restore.architecture", "riscv64", os.uname().machine)),
    "CRIU": ({"criu": "99.1"}, ("restore.criu", "99.1", CRIU_VERSION)),
    "CPU": ({"cpu_features": "made_up_feature"}, ("restore.cpu", "made_up_feature", "missing")),
}


@pytest.mark.parametrize("fact", FACTS)
def test_another_machine_is_refused(
    place: Place, frozen: Frozen, artifact: Path, waiting: Box, fact: str
) -> None:
    """What was and what is stand in the refusal; a good artifact is thawed there afterwards."""
    changes, words = FACTS[fact]
    manifest = parse_manifest((artifact / "manifest.json").read_bytes())
    if "criu" in changes:
        edit(artifact, criu=manifest.criu.model_copy(update={"version": changes["criu"]}))
    elif "cpu_features" in changes:
        edit(artifact, cpu_features=(*manifest.cpu_features, changes["cpu_features"]))
    else:
        edit(artifact, **changes)
    with untouched(place.node, waiting):
        result = place.node.run("restore", frozen.id, "--into", waiting.id, check=INCOMPATIBLE)
        refused(result, *words, "as it was")
    thaws_after_all(place, frozen, waiting)


def test_a_placeholder_without_a_mount_is_refused_and_starts_cold(
    place: Place, frozen: Frozen, artifact: Path
) -> None:
    """The mount is named; nothing is changed before the placeholder's own command runs."""
    assert artifact.is_dir()
    cold = ("/bin/sh", "-c", "echo started cold, $(ls -A /srv | wc -l) file; exec sleep 1000")
    bare = place.placeholder(frozen.id, "--", *cold)
    before = snapshot(bare)
    result = place.node.run("restore", frozen.id, "--into", bare.id, check=INCOMPATIBLE)
    refused(result, "restore.mounts", "no mount at /models", "as it was")
    until("cold start", lambda: "started cold, 1 file\n" in bare.log())
    assert differences({"files": before["files"]}, snapshot(bare)) == {}


def test_a_file_where_a_directory_was_is_refused(place: Place, frozen: Frozen, artifact: Path) -> None:
    """The mount is there, but of the other kind."""
    assert artifact.is_dir()
    file = place.node.base / "models"
    file.touch()
    other = place.placeholder(frozen.id, more_binds=[(file, "/models", "ro")])
    with untouched(place.node, other):
        result = place.node.run("restore", frozen.id, "--into", other.id, check=INCOMPATIBLE)
        refused(result, "restore.mounts", "/models is a file", "directory")


def test_a_limit_below_the_image_is_refused(place: Place, frozen: Frozen, artifact: Path) -> None:
    """Both sizes are named."""
    pages = sum(path.stat().st_size for path in (artifact / "images").glob("pages-*"))
    small = place.placeholder(frozen.id, more_binds=frozen.binds, memory=pages - pages % 4096)
    with untouched(place.node, small):
        result = place.node.run("restore", frozen.id, "--into", small.id, check=INCOMPATIBLE)
        refused(result, "restore.memory_limit", str(pages), str(small.memory_limit()))


def flip(path: Path, at: int) -> None:
    """Change one byte of a file."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x40]))


def flip_pages(artifact: Path) -> None:
    """Change one byte of the worker's memory."""
    flip(artifact / "images" / "pages-1.img", 4096 * 3 + 5)


def cut_pages(artifact: Path) -> None:
    """Take a page away."""
    path = artifact / "images" / "pages-1.img"
    os.truncate(path, path.stat().st_size - 4096)


def lose_an_image(artifact: Path) -> None:
    """Take an image away."""
    (artifact / "images" / "inventory.img").unlink()


def header(artifact: Path, change: Callable[[bytearray], None], *, checksum: bool = True) -> None:
    """Change the header of the ready file, which is empty, in the rootfs diff."""
    path = artifact / "rootfs.tar"
    data = bytearray(path.read_bytes())
    at = next(at for at in range(0, len(data), 512) if data[at : at + 12] == b"./srv/ready\0")
    block = data[at : at + 512]
    change(block)
    if checksum:
        block[148:156] = b" " * 8
        block[148:156] = b"%06o\0 " % sum(block)
    data[at : at + 512] = block
    path.write_bytes(data)


def flip_header(artifact: Path) -> None:
    """Change one byte of a header; the size stays."""
    header(artifact, lambda block: block.__setitem__(100, block[100] ^ 1), checksum=False)


def climb(artifact: Path) -> None:
    """Have a name lead out of the root."""
    header(artifact, lambda block: block.__setitem__(slice(0, 13), b"./../../evil\0"))


def be_a_device(artifact: Path) -> None:
    """Have a file be the device that is the kernel's memory."""

    def change(block: bytearray) -> None:
        block[156:157] = b"3"
        block[329:337], block[337:345] = b"0000001\0", b"0000001\0"

    header(artifact, change)


DAMAGES: dict[str, tuple[Callable[[Path], None], tuple[str, ...], tuple[str, ...]]] = {
    "a flipped byte": (flip_pages, ("--digests",), ("images/pages-1.img", "digest")),
    "a page less": (cut_pages, (), ("images/pages-1.img", "bytes")),
    "an image less": (lose_an_image, (), ("images/inventory.img",)),
    "a flipped byte in the diff's header": (flip_header, (), ("rootfs", "checksum")),
    "a path out of the root": (climb, (), ("rootfs",)),
    "a device in the diff": (be_a_device, (), ("rootfs", "device")),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_artifact_is_refused(
    place: Place, frozen: Frozen, artifact: Path, waiting: Box, damage: str
) -> None:
    """The file is named, and nothing of it reaches the container."""
    spoil, options, words = DAMAGES[damage]
    spoil(artifact)
    with untouched(place.node, waiting):
        result = place.node.run("restore", frozen.id, "--into", waiting.id, *options, check=CORRUPT)
        refused(result, *words)
    assert not (place.node.base / "evil").exists()
    thaws_after_all(place, frozen, waiting)


def test_what_is_no_placeholder_is_refused(place: Place, frozen: Frozen, artifact: Path) -> None:
    """A worker at work goes on; an unknown name and one that means two are told apart."""
    assert artifact.is_dir()
    node = place.node
    worker = place.start(frozen.id, "--no-ready", more_binds=frozen.binds)
    worker.counts_on()
    result = node.run("restore", frozen.id, "--into", worker.id, check=INCOMPATIBLE)
    refused(result, "restore.placeholder", str(worker.pid), "static-worker")
    worker.counts_on()
    refused(
        node.run("restore", frozen.id, "--into", "0" * 64, check=1), "no container on this node", "0" * 64
    )
    other = place.placeholder(frozen.id, more_binds=frozen.binds)
    prefix = place.runtime.kit.token
    with untouched(node, other):
        result = node.run("restore", frozen.id, "--into", prefix, check=INCOMPATIBLE)
        refused(result, prefix, worker.id, other.id)


def test_a_container_and_the_node_are_not_the_same(
    place: Place, frozen: Frozen, artifact: Path, waiting: Box
) -> None:
    """A container's dump is not restored on the node, nor a dump of the node's own process in a container."""
    assert artifact.is_dir()
    node = place.node
    refused(node.run("restore", frozen.id, check=INCOMPATIBLE), "restore.container", "--into")
    worker = node.start_worker("--no-ready")
    until("worker at work", lambda: worker.count() >= 1)
    node.run("checkpoint", "--pid", worker.pid)
    with untouched(node, waiting):
        result = node.run("restore", worker.id, "--into", waiting.id, check=INCOMPATIBLE)
        refused(result, "restore.container", "without --into")
    thaws_after_all(place, frozen, waiting)


# a restore that breaks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", RESTORE_MOMENTS)
def test_criu_is_killed_in_a_restore(
    place: Place, frozen: Frozen, artifact: Path, waiting: Box, moment: str
) -> None:
    """Half a tree is ended, the files go back, and the next try succeeds."""
    assert artifact.is_dir()
    fake = killer(place.node, "restore", RESTORE_MOMENTS[moment])
    with untouched(place.node, waiting):
        result = place.node.run("restore", frozen.id, "--into", waiting.id, check=1, CRIU_BINARY=str(fake))
        refused(result, "the container is as it was")
        assert (place.node.base / "killed-once").exists()
    thaws_after_all(place, frozen, waiting)


def fake_restore(node: Node, body: str) -> str:
    """Write a CRIU whose ``restore`` is a piece of shell: its path.

    The piece finds the arguments in ``$@``, ``$work`` and ``$log``, and the real program in ``${criu[@]}``.
    """
    criu = " ".join(f"'{word}'" for word in find_criu("").argv)
    path = node.base / "criu-fake-restore"
    path.write_text(
        f"""#!/bin/bash
criu=({criu})
if [ "$1" != restore ]; then exec "${{criu[@]}}" "$@"; fi
args=("$@")
while [ $# -gt 0 ]; do
  case "$1" in --work-dir) work=$2;; --log-file) log=$2;; esac
  shift
done
set -- "${{args[@]}}"
touch {node.base}/began
{body}
"""
    )
    path.chmod(0o700)
    return str(path)


BROKEN = {
    "it fails": ("echo 'Error (criu/x.c:1): made up' > \"$work/$log\"; exit 1", "made up"),
    "it fails when all is restored": ('"${criu[@]}" "$@"; exit 1', ""),
    "it is not there": ("", ""),
    "it hangs": ("exec sleep 600", "1 s"),
    "it hangs with half a tree": (
        """"${criu[@]}" "$@" &
until grep -q 'Restoring' "$work/$log" 2>/dev/null; do :; done
kill -STOP $!; touch "$work/half"; wait $!""",
        "1 s",
    ),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_criu_that_does_not_restore(
    place: Place, frozen: Frozen, artifact: Path, waiting: Box, how: str
) -> None:
    """It fails or hangs; what it has made is taken away again."""
    assert artifact.is_dir()
    body, word = BROKEN[how]
    fake = fake_restore(place.node, body or "exec /nowhere/criu")
    with untouched(place.node, waiting):
        result = place.node.run(
            "restore",
            frozen.id,
            "--into",
            waiting.id,
            check=1,
            CRIU_BINARY=fake,
            RESTORE_DEADLINE_SECONDS="1",
        )
        refused(result, word, "the container is as it was")
    thaws_after_all(place, frozen, waiting)


def test_a_container_that_vanishes_in_the_restore(
    place: Place, frozen: Frozen, artifact: Path, waiting: Box
) -> None:
    """The command says so and ends; nothing of it is left."""
    assert artifact.is_dir()
    node = place.node
    with asked(node, frozen, waiting, fake_restore(node, "exec sleep 600")) as command:
        until("restore", (node.base / "began").exists)
        waiting.kill()
        _, said = command.communicate(timeout=30)
    assert command.returncode == 1, said
    assert "the container has ended" in said
    until("end of all helpers", lambda: not processes_with(str(node.base)))
    thaws_after_all(place, frozen, place.placeholder(frozen.id, more_binds=frozen.binds))


@contextmanager
def asked(node: Node, frozen: Frozen, box: Box, criu: str) -> Iterator[subprocess.Popen[str]]:
    """Start a restore and go on while it runs."""
    command = subprocess.Popen(
        [HIBERNODE, "restore", frozen.id, "--into", box.id],
        env=node.env(CRIU_BINARY=criu),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield command
    finally:
        command.kill()
        command.communicate(timeout=30)


def test_a_full_disk_for_what_undoes_a_restore(
    place: Place, frozen: Frozen, artifact: Path, waiting: Box
) -> None:
    """What would be replaced does not fit where it is to be kept, so nothing is replaced."""
    assert artifact.is_dir()
    (waiting.root / "srv/box.log").write_bytes(os.urandom(4 * MIB))
    with small_tmpfs(place.node.state, "1m", "0700"), untouched(place.node, waiting):
        result = place.node.run("restore", frozen.id, "--into", waiting.id, check=CORRUPT)
        refused(result, "pace", "as it was")
    (waiting.root / "srv/box.log").unlink()
    thaws_after_all(place, frozen, waiting)


# a command that is killed ---------------------------------------------------------------------------------

STEPS = ["verify", "compatibility", "prepare", "rootfs", "restore"]


@pytest.mark.parametrize("step", STEPS)
def test_the_command_is_killed_in_a_restore(
    place: Place, frozen: Frozen, artifact: Path, waiting: Box, step: str
) -> None:
    """The next agent takes back what it has done to the container."""
    assert artifact.is_dir()
    node = place.node
    with untouched(node, waiting):
        node.run(
            "restore",
            frozen.id,
            "--into",
            waiting.id,
            check=-signal.SIGKILL,
            FAULT=f"kill@restore.{step}",
        )
        stop(node, node.start_agent())
    thaws_after_all(place, frozen, waiting)


def stop(node: Node, agent: subprocess.Popen[bytes]) -> None:
    """End an agent in good order."""
    agent.terminate()
    assert agent.wait(timeout=30) == 0, node.tail()


def test_the_command_is_killed_when_all_is_done(
    place: Place, frozen: Frozen, artifact: Path, waiting: Box
) -> None:
    """The worker lives on, and the next agent only writes down that it does."""
    assert artifact.is_dir()
    node = place.node
    node.run("restore", frozen.id, "--into", waiting.id, check=-signal.SIGKILL, FAULT="kill@restore.announce")
    waiting.counts_on()
    node.start_agent()
    assert waiting.counts_on()["restored"] is True
    waiting.ask_exit(11)
    assert waiting.wait() == 11


def test_the_command_is_killed_and_the_shim_goes_on(
    place: Place, frozen: Frozen, artifact: Path, waiting: Box
) -> None:
    """CRIU has begun; it ends its work though nobody waits for it, and the worker lives."""
    assert artifact.is_dir()
    node = place.node
    fake = fake_restore(node, f'until [ -e {node.base}/go ]; do sleep 0.01; done; exec "${{criu[@]}}" "$@"')
    with asked(node, frozen, waiting, fake) as command:
        until("restore", (node.base / "began").exists)
        command.kill()
        command.wait()
    (node.base / "go").touch()
    until("restored worker", lambda: node.restored_phase(frozen.id))
    node.start_agent()
    assert waiting.counts_on()["restored"] is True
    waiting.ask_exit(11)
    assert waiting.wait() == 11


@pytest.mark.parametrize("shim_too", [False, True], ids=["command", "command and shim"])
def test_all_is_killed_in_the_middle_of_a_restore(
    place: Place, frozen: Frozen, artifact: Path, waiting: Box, *, shim_too: bool
) -> None:
    """CRIU hangs with half a tree; the next agent ends it and brings the files back."""
    assert artifact.is_dir()
    node = place.node
    body, _ = BROKEN["it hangs with half a tree"]
    fake = fake_restore(node, body)
    with untouched(node, waiting):
        with asked(node, frozen, waiting, fake) as command:
            until("half a tree", lambda: list(node.state.glob("restores/*/half")))
            states = [read_json(path) for path in node.state.glob("restores/*/state.json")]
            command.kill()
            command.wait()
        if shim_too:
            os.kill(int((states[0] or {})["shim_pid"]), signal.SIGKILL)
        stop(node, node.start_agent())
    thaws_after_all(place, frozen, waiting)


def test_the_shim_alone_is_killed_when_all_is_restored(
    place: Place, frozen: Frozen, artifact: Path, waiting: Box
) -> None:
    """The command ends the worker, brings the files back and takes the marker away, before it answers."""
    assert artifact.is_dir()
    node = place.node
    fake = fake_restore(node, '"${criu[@]}" "$@"; touch "$work/whole"; exec sleep 600')
    with untouched(node, waiting), asked(node, frozen, waiting, fake) as command:
        until("worker", lambda: list(node.state.glob("restores/*/whole")))
        (state,) = node.state.glob("restores/*/state.json")
        os.kill((read_json(state) or {})["shim_pid"], signal.SIGKILL)
        _, said = command.communicate(timeout=30)
        assert command.returncode == 1
        assert "the shim ended before CRIU had ended" in said
        assert "the container is as it was" in said
        assert not children(waiting.pid)
    thaws_after_all(place, frozen, waiting)


# a dump that breaks ---------------------------------------------------------------------------------------


def runs_on(node: Node, box: Box) -> None:
    """See that a worker is as before: not frozen, stopped or traced, counting; nothing is left of a dump."""
    assert set(freezer_states(box)) <= {"THAWED", "0"}
    for pid in [box.pid, *descendants(box.pid)]:
        assert "TracerPid:\t0" in Path(f"/proc/{pid}/status").read_text()
        assert state_letter(pid) in "SRD"
    box.counts_on()
    assert box.alive()
    until("end of all helpers", lambda: not helpers(node))
    assert not children(box.pid)


def nothing_of(node: Node, id_: str) -> None:
    """See that nothing was published and nothing is staged."""
    assert node.final_name(id_) == "absent"
    assert not any((node.store / ".staging").iterdir())


def started(place: Place, **more: Any) -> tuple[str, Box]:
    """Start a worker that waits for no answer."""
    id_ = place.node.new_id()
    box = place.start(id_, env=SILENT, **more)
    box.counts_on()
    return id_, box


def stopped_dump(node: Node, needle: str) -> FakeCriu:
    """Make a CRIU that stops itself in a dump when its log says ``needle``; ``victim`` has its pid then."""
    criu = " ".join(f"'{word}'" for word in find_criu("").argv)
    return FakeCriu(
        node,
        f"""{criu} "$@" & victim=$!
until grep -q '{needle}' "$work/$log" 2>/dev/null; do kill -0 $victim 2>/dev/null || break; done
kill -STOP $victim; echo $victim > {node.base}/victim.new; mv {node.base}/victim.new {node.base}/victim
wait $victim; exit $?""",
    )


def harmless(victim: int, box: Box) -> int:
    """Move a stopped CRIU to a moment where its death does not kill the worker: nobody can help those."""
    until("stopped criu", lambda: state_letter(victim) == "T")
    while not is_safe(box.pid):
        os.kill(victim, signal.SIGCONT)
        os.sched_yield()
        os.kill(victim, signal.SIGSTOP)
        until("stopped criu", lambda: state_letter(victim) == "T")
    return victim


@pytest.mark.parametrize("moment", DUMP_MOMENTS)
def test_criu_is_killed_in_a_dump(place: Place, moment: str) -> None:
    """The worker runs on and the next dump works."""
    node = place.node
    id_, box = started(place)
    fake = stopped_dump(node, DUMP_MOMENTS[moment])
    command = subprocess.Popen(
        [HIBERNODE, "checkpoint", "--container", box.id], env=node.env(), stderr=subprocess.PIPE, text=True
    )
    victim = int(until("stopped criu", lambda: text_of(node.base / "victim")))
    os.kill(harmless(victim, box), signal.SIGKILL)
    _, said = command.communicate(timeout=60)
    assert command.returncode == 1, said
    assert "criu dump failed" in said
    runs_on(node, box)
    nothing_of(node, id_)
    fake.be_real()
    node.run("checkpoint", "--container", box.id)
    runs_on(node, box)
    assert node.final_name(id_) == "whole"


def text_of(path: Path) -> str:
    """Read a file; nothing if it is not there yet."""
    return path.read_text() if path.exists() else ""


def test_the_files_of_a_container_cannot_be_saved(place: Place) -> None:
    """What is done while the tree is frozen fails: CRIU is told, lets it go, and the cause is named."""
    node = place.node
    id_, box = started(place)
    result = node.run("checkpoint", "--container", box.id, check=CORRUPT, FAULT="fail@checkpoint.rootfs")
    refused(result, "fault point checkpoint.rootfs")
    runs_on(node, box)
    nothing_of(node, id_)


def test_a_store_that_is_full_when_the_files_come(place: Place) -> None:
    """The images fit, the rootfs diff does not."""
    node = place.node
    id_, box = started(place)
    (box.root / "srv/large").write_bytes(os.urandom(64 * MIB))
    with small_tmpfs(node.store, "48m", "0700"):
        refused(node.run("checkpoint", "--container", box.id, check=None), "pace")
        runs_on(node, box)
        nothing_of(node, id_)
        (box.root / "srv/large").unlink()
        node.run("checkpoint", "--container", box.id)
        assert node.final_name(id_) == "whole"


def test_a_worker_that_ends_in_its_dump(place: Place) -> None:
    """The command says that it is gone; nothing is published."""
    node = place.node
    id_, box = started(place)
    FakeCriu(node, 'kill -9 $tree; real "$@"; exit $?')
    refused(node.run("checkpoint", "--container", box.id, check=INCOMPATIBLE), str(box.pid), "ended")
    assert box.wait() == 128 + signal.SIGKILL
    nothing_of(node, id_)
    until("end of all helpers", lambda: not processes_with(str(node.base)))


@pytest.mark.parametrize("step", ["preflight", "dump", "rootfs", "seal", "publish", "announce"])
def test_the_agent_is_killed_in_a_dump(place: Place, step: str) -> None:
    """The worker runs on; the next agent finishes the dump or takes it up again."""
    node = place.node
    id_ = node.new_id()
    box = place.start(id_)
    box.counts_on()  # an agent that finds it when it starts need not look again
    agent = node.start_agent(wait=False, FAULT=f"kill@checkpoint.{step}")
    assert agent.wait(timeout=60) == -signal.SIGKILL
    until("worker that was let go", lambda: set(freezer_states(box)) <= {"THAWED", "0"})
    until("worker that runs", lambda: state_letter(box.pid) in "SR")
    box.counts_on()
    assert node.final_name(id_) == ("whole" if step == "announce" else "absent")
    node.start_agent()
    assert node.done(id_)["success"] is True, node.tail()
    assert box.wait() == 0
    assert node.final_name(id_) == "whole"
    until("empty staging", lambda: not any((node.store / ".staging").iterdir()))


@pytest.mark.parametrize("moment", DUMP_MOMENTS)
def test_the_agent_is_killed_with_the_container_frozen(place: Place, moment: str) -> None:
    """CRIU is stuck and holds it; the next agent ends CRIU, lets the worker go and dumps it."""
    node = place.node
    fake = stopped_dump(node, DUMP_MOMENTS[moment])
    id_ = node.new_id()
    box = place.start(id_)
    box.counts_on()
    agent = node.start_agent()
    victim = int(until("stopped criu", lambda: text_of(node.base / "victim")))
    until("stopped criu", lambda: state_letter(victim) == "T")
    assert "TracerPid:\t0" not in Path(f"/proc/{box.pid}/status").read_text()
    agent.kill()
    agent.wait()
    fake.be_real()
    node.start_agent()
    assert node.done(id_)["success"] is True, node.tail()
    assert box.wait() == 0
    assert node.final_name(id_) == "whole"


# two agents -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("same_worker", [True, False], ids=["one worker", "two workers of one id"])
def test_two_agents_share_a_store(place: Place, tmp_path: Path, *, same_worker: bool) -> None:
    """While the first dumps the other says that it waits; the id is dumped once, and all are answered."""
    node, other = place.node, Node(tmp_path)
    other.store = node.store
    other.signals = node.signals if same_worker else tmp_path / "signals"
    fake = FakeCriu(node, f'until [ -e {node.base}/go ]; do sleep 0.01; done; real "$@"; exit $?')
    other.config["CRIU_BINARY"] = str(fake.path)
    places = [place, Place(other, place.runtime, place.image, place.worker)]
    id_ = node.new_id()
    boxes = [here.start(id_) for here in places[: 1 if same_worker else 2]]
    for box in boxes:
        box.counts_on()
    try:
        agents = [here.start_agent(wait=False) for here in (node, other)]
        until("dump", fake.began)
        until(
            "one that waits", lambda: any(f"{id_}" in text and "Busy" in text for text in said(node, other))
        )
        (node.base / "go").touch()
        for here in (node, other):
            assert here.done(id_)["success"] is True, said(node, other)
        assert [box.wait() for box in boxes] == [0] * len(boxes)
        assert [agent.poll() for agent in agents] == [None, None]
    finally:
        other.close()
    assert node.final_name(id_) == "whole"
    assert not (node.store / ".previous" / id_).exists()


def said(*nodes: Node) -> list[str]:
    """Read the logs of the nodes' agents."""
    return [text_of(node.log) for node in nodes]


def test_two_dumps_of_one_id_at_one_time(place: Place) -> None:
    """The second is told that the first is at it, and finds its checkpoint afterwards."""
    node = place.node
    id_, box = started(place)
    twin = place.start(id_, env=SILENT)
    twin.counts_on()
    fake = FakeCriu(node, f'until [ -e {node.base}/go ]; do sleep 0.01; done; real "$@"; exit $?')
    first = subprocess.Popen(
        [HIBERNODE, "checkpoint", "--container", box.id],
        env=node.env(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    until("dump", fake.began)
    refused(node.run("checkpoint", "--container", twin.id, check=INCOMPATIBLE), id_)
    (node.base / "go").touch()
    assert first.wait(timeout=60) == 0, first.communicate()
    first.communicate()
    again = json.loads(node.run("checkpoint", "--container", twin.id, "-o", "json").stdout)
    assert again["reused"] is True
    runs_on(node, twin)
    assert node.final_name(id_) == "whole"
    assert not (node.store / ".previous" / id_).exists()
