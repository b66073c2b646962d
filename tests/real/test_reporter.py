"""An agent that only reports: no CRIU, no store, no signal directory, and no privilege."""

from __future__ import annotations

import json
import subprocess

from tests.real.node import HIBERNODE, Node, until


def test_it_runs_without_any_capability_and_touches_neither_store_nor_signals(node: Node) -> None:
    """It is ready, says so in its status, and leaves the ready files of workers alone."""
    env = node.env(CHECKPOINT_ENABLED="false", CRIU_BINARY="/no/criu", STORE_PATH="/proc/no-store")
    nothing = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"]
    with node.log.open("ab") as log:
        agent = subprocess.Popen([*nothing, HIBERNODE, "run"], env=env, stdout=log, stderr=log)
    node.agents.append(agent)

    def said() -> dict[str, object] | None:
        assert agent.poll() is None, node.log.read_text()
        result = node.run("status", "-o", "json", check=None)
        return json.loads(result.stdout) if result.returncode == 0 else None

    status = until("status", said)
    assert "checkpoint.enabled" in str(status["criu"])
    assert status["jobs"] == []
    assert not node.signals.exists()
    agent.terminate()
    assert agent.wait(timeout=60) == 0, node.log.read_text()
    assert "Traceback" not in node.log.read_text()
