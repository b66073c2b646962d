"""The main job in a real cluster, by DaemonSet, controller, Job and restore pod."""

from __future__ import annotations

import pytest

from tests.cluster.story import Story

pytestmark = [pytest.mark.cluster, pytest.mark.containers, pytest.mark.criu]


def test_a_checkpoint_becomes_ready_and_a_restore_pod_answers_as_its_worker_did(cluster):
    """What ships does it, from kubectl apply to the answer."""
    story = Story(cluster, print)
    try:
        story.run()
    finally:
        story.close()
