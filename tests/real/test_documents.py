"""What the documents tell people to type works as it stands there."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.real import images
from tests.real.node import HIBERNODE, Node, until

CONTAINERS = Path(__file__).parents[2] / "docs" / "containers.md"


@pytest.mark.criu
@pytest.mark.containers
def test_the_worker_of_the_runc_example_can_be_dumped(node: Node) -> None:
    """Five lines, with any image that has a shell; only the container's name is another here."""
    name = f"worker-{node.new_id()}"
    (example,) = (text for text in re.findall(r"```sh\n(.*?)```", CONTAINERS.read_text(), re.DOTALL))
    lines = re.sub(r"\bworker\b(?!\.)", name, example).splitlines()
    assert len(lines) == 5
    image = node.base / "image.tar"
    subprocess.run(["tar", "-C", images.busybox(), "-cf", image, "."], check=True, timeout=60)
    env = node.env()
    env["PATH"] = f"{HIBERNODE.parent}:{env['PATH']}"
    bundle = node.base / "box"

    def type_in(*words: str, where: Path) -> None:
        with node.log.open("ab") as log:
            script = ["bash", "-euc", "\n".join(words)]
            subprocess.run(script, cwd=where, env=env, stdout=log, stderr=log, check=True, timeout=120)

    bundle.mkdir()
    (bundle / "image.tar").symlink_to(image)
    try:
        type_in(*lines[:4], where=bundle)
        log = bundle / "box" / "worker.log"
        until("worker", lambda: log.exists() and "alive" in log.read_text())
        type_in(lines[4], where=bundle)
        (checkpoint,) = node.store.glob("[0-9a-f]*")
        assert (checkpoint / "manifest.json").exists()
        before = log.stat().st_size
        until("worker that runs on", lambda: log.stat().st_size > before)
    finally:
        subprocess.run(["runc", "delete", "--force", name], check=False, timeout=60)
