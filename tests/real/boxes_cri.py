"""Pods through containerd's CRI socket, made as the kubelet makes them."""

from __future__ import annotations

import json
import re
import uuid
from pathlib import Path
from typing import Any

from tests.real.boxes import Box, Kit, Recipe, Runtime
from tests.real.boxes_clear import remove_cgroups
from tests.real.boxes_ctr import KUBERNETES
from tests.real.boxes_wire import CONTAINER, EXITED, LOCALHOST, UNCONFINED, Message, pairs
from tests.real.node import until

RUNTIME = "runtime.v1.RuntimeService"
MASKED = [
    *(
        f"/proc/{name}"
        for name in ("asound", "acpi", "kcore", "keys", "latency_stats", "timer_list", "timer_stats")
    ),
    *("/proc/sched_debug", "/proc/scsi", "/sys/firmware"),
]
READONLY = [f"/proc/{name}" for name in ("bus", "fs", "irq", "sys", "sysrq-trigger")]
"""What the kubelet masks and protects in a pod that is not privileged."""


class Pod:
    """A sandbox and the containers in it."""

    def __init__(self, runtime: CriRuntime, recipe: Recipe) -> None:
        self.runtime = runtime
        self.uid = str(uuid.UUID(runtime.kit.new_id()[:32]))
        self.name = f"{recipe.name}-{self.uid[-6:]}"
        self.folder = runtime.kit.folder(recipe.name)
        self.containers = 0
        self.attempts = 0
        labels = {"name": self.name, "namespace": "default", "uid": self.uid}
        self.labels = {f"io.kubernetes.pod.{name}": value for name, value in labels.items()}
        self.config: Message = {
            "metadata": {**labels, "attempt": 0},
            "hostname": recipe.hostname,
            "log_directory": str(self.folder),
            "labels": pairs(self.labels),
            "linux": {
                # As below a kubelet that runs in a container itself: nobody else has this parent.
                "cgroup_parent": f"/cri-{runtime.kit.token}/kubepods/burstable/pod{self.uid}",
                "security_context": {"namespace_options": {"pid": runtime.pid_mode}},
            },
        }
        (self.folder / "hosts").write_text("127.0.0.1 localhost\n")
        self.id: str = runtime.call("RunPodSandbox", config=self.config)["pod_sandbox_id"]

    def remove(self) -> None:
        """Stop and remove it; its cgroup is the kubelet's to remove."""
        self.runtime.call("StopPodSandbox", pod_sandbox_id=self.id)
        self.runtime.call("RemovePodSandbox", pod_sandbox_id=self.id)
        remove_cgroups(self.uid)


class CriRuntime(Runtime):
    """Containers in pods."""

    kind = "cri"

    def __init__(self, kit: Kit) -> None:
        super().__init__(kit)
        self.daemon = kit.daemon()
        self.pods: list[Pod] = []
        self.pid_mode = CONTAINER
        """Whose pid namespace containers live in: their own, the ``POD``'s or the ``NODE``'s."""

    def call(self, method: str, **request: Any) -> Message:
        """Call the CRI's runtime service."""
        return self.daemon.wire.call(f"{RUNTIME}/{method}", **request)

    def _start(self, recipe: Recipe) -> Box:
        image = self.daemon.import_image(recipe.image, KUBERNETES)
        if recipe.new_pod or not self.pods:
            self.pods.append(Pod(self, recipe))
        pod = self.pods[-1]
        pod.attempts += 1
        config = self.config(recipe, pod, image)
        id_ = self.call("CreateContainer", pod_sandbox_id=pod.id, config=config, sandbox_config=pod.config)[
            "container_id"
        ]
        pod.containers += 1
        self.call("StartContainer", container_id=id_)
        answer = self.call("ContainerStatus", container_id=id_, verbose=True)
        info = json.loads(next(pair["value"] for pair in answer["info"] if pair["key"] == "info"))
        return CriBox(recipe, id_, int(info["pid"]), pod, pod.folder / config["log_path"])

    def close(self) -> None:
        """Remove all boxes, then the pods whose container did not start."""
        super().close()
        for pod in self.pods:
            pod.remove()
        self.pods.clear()

    def config(self, recipe: Recipe, pod: Pod, image: str) -> Message:
        """Describe the container as the kubelet would."""
        assert not recipe.bounding, "CRI gives a capability in all sets"
        name, attempt = recipe.name, pod.attempts - 1
        termination = pod.folder / f"termination-{attempt}"
        termination.touch(mode=0o666)
        (pod.folder / name).mkdir(exist_ok=True)
        mounts = [
            (str(pod.folder / "hosts"), "/etc/hosts", "rw"),
            (str(termination), "/dev/termination-log", "rw"),
        ]
        security: Message = {
            "namespace_options": {"pid": self.pid_mode},
            "readonly_rootfs": recipe.readonly_root,
            "no_new_privs": True,
            "run_as_user": {"value": recipe.uid},
            "run_as_group": {"value": recipe.uid},
            "masked_paths": MASKED,
            "readonly_paths": READONLY,
            "seccomp": {"profile_type": UNCONFINED},
        }
        if recipe.seccomp is not None:
            security["seccomp"] = {"profile_type": LOCALHOST, "localhost_ref": str(recipe.seccomp)}
        return {
            "metadata": {"name": name, "attempt": attempt},
            "image": {"image": image},
            "command": list(recipe.argv),
            "envs": pairs(dict(recipe.env)),
            "mounts": [
                {"host_path": str(host), "container_path": inside, "readonly": mode == "ro"}
                for host, inside, mode in [*mounts, *recipe.binds]
            ],
            "labels": pairs({**pod.labels, "io.kubernetes.container.name": name}),
            "log_path": f"{name}/{attempt}.log",
            "tty": recipe.tty,
            "linux": {
                "resources": {"memory_limit_in_bytes": recipe.memory or 0},
                "security_context": security,
            },
        }


class CriBox(Box):
    """A container of a pod."""

    def __init__(self, recipe: Recipe, id_: str, pid: int, pod: Pod, log: Path) -> None:
        super().__init__(recipe, id_, pid)
        self.pod, self._log = pod, log

    def log(self) -> str:
        # Time, stream, and F for the end of a line or P for a part of a longer one.
        found = re.findall(
            r"^\S+ (?:stdout|stderr) ([FP])\S* (.*)$", self._log.read_text(errors="replace"), re.MULTILINE
        )
        return "".join(text + ("\n" if mark == "F" else "") for mark, text in found)

    def wait(self, seconds: float = 60) -> int:
        def ended() -> Message | None:
            status: Message = self.pod.runtime.call("ContainerStatus", container_id=self.id)["status"]
            return status if status["state"] == EXITED else None

        code: int = until(f"end of {self.name}", ended, seconds)["exit_code"]
        return code

    def _remove(self) -> None:
        self.wait()
        self.pod.runtime.call("RemoveContainer", container_id=self.id)
        self.pod.containers -= 1
        if not self.pod.containers:
            self.pod.remove()
            self.pod.runtime.pods.remove(self.pod)
