"""Containers of runc and crun, without any daemon."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.real import box_supervisor, images
from tests.real.boxes import Box, Kit, Recipe, Runtime
from tests.real.boxes_clear import CGROUPS, remove_cgroups
from tests.real.node import until

CAPABILITIES = [
    f"CAP_{name}"
    for name in (
        *("AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD", "NET_BIND_SERVICE"),
        *("NET_RAW", "SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT"),
    )
]
"""What containerd and docker give a container by default."""


class OciRuntime(Runtime):
    """runc or crun: an overlay mounted here, a ``config.json`` from the runtime's own template."""

    def __init__(self, kit: Kit, kind: str) -> None:
        super().__init__(kit)
        self.kind = kind
        self.command = [*self._way(), kind, "--root", str(kit.base / kind)]

    def _way(self) -> list[str]:
        """Hide the unified hierarchy from crun where that has controllers: it refuses such machines."""
        controllers = CGROUPS / "unified/cgroup.controllers"
        if self.kind != "crun" or not controllers.exists() or not controllers.read_text().strip():
            return []
        return ["unshare", "--mount", "sh", "-ec", f'umount {controllers.parent}; exec "$@"', "sh"]

    @cached_property
    def template(self) -> str:
        """Ask the runtime what it takes for a usual container."""
        folder = self.kit.folder("spec")
        subprocess.run([self.kind, "spec"], cwd=folder, check=True, timeout=60)
        return (folder / "config.json").read_text()

    def config(self, recipe: Recipe, id_: str, root: Path) -> dict[str, Any]:
        """Write what the recipe says into the template."""
        config: dict[str, Any] = json.loads(self.template)
        env = {"PATH": images.PATH, **recipe.env}
        config["process"] |= {
            "terminal": recipe.tty,
            "user": {"uid": recipe.uid, "gid": recipe.uid},
            "args": list(recipe.argv),
            "env": [f"{name}={value}" for name, value in env.items()],
            "capabilities": {
                "bounding": [*CAPABILITIES, *recipe.bounding],
                "effective": CAPABILITIES,
                "permitted": CAPABILITIES,
            },
        }
        config["root"] = {"path": str(root), "readonly": recipe.readonly_root}
        config["hostname"] = recipe.hostname
        config["mounts"] += [
            {
                "destination": inside,
                "type": "bind",
                "source": str(host),
                "options": ["rbind", *mode.split(",")],
            }
            for host, inside, mode in recipe.binds
        ]
        config["linux"]["cgroupsPath"] = f"/{self.kind}-{self.kit.token}/{id_}"
        if recipe.memory is not None:
            config["linux"].setdefault("resources", {})["memory"] = {"limit": recipe.memory}
        if recipe.seccomp is not None:
            config["linux"]["seccomp"] = json.loads(recipe.seccomp.read_text())
        config["linux"] |= recipe.linux
        return config

    def _start(self, recipe: Recipe) -> Box:
        folder, id_ = self.kit.folder(recipe.name), self.kit.new_id()
        for name in ("upper", "work", "rootfs"):
            (folder / name).mkdir()
        options = f"lowerdir={recipe.image},upperdir={folder / 'upper'},workdir={folder / 'work'}"
        root = folder / "rootfs"
        subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, root], check=True, timeout=60)
        (folder / "config.json").write_text(json.dumps(self.config(recipe, id_, root)))
        console: list[str | Path] = (
            ["--console-socket", str(folder / box_supervisor.CONSOLE)] if recipe.tty else []
        )
        start = [
            *self.command,
            "run",
            "--detach",
            "--bundle",
            folder,
            *console,
            "--pid-file",
            folder / "pid",
            id_,
        ]
        supervisor = subprocess.Popen(
            [sys.executable, "-I", "-S", box_supervisor.__file__, folder, *start],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        until(
            "answer of the supervisor",
            lambda: (folder / "started").exists() or supervisor.poll() is not None,
        )
        failed = folder / "failed"
        if failed.exists():
            supervisor.communicate(timeout=60)
            subprocess.run(["umount", root], check=True, timeout=60)
            raise AssertionError(failed.read_text())
        return OciBox(recipe, id_, folder, self.command, supervisor)


class OciBox(Box):
    """A container of runc or crun and its supervisor."""

    def __init__(
        self, recipe: Recipe, id_: str, folder: Path, command: list[str], supervisor: subprocess.Popen[bytes]
    ) -> None:
        super().__init__(recipe, id_, int((folder / "pid").read_text()))
        self._folder, self._command, self._supervisor = folder, command, supervisor

    def log(self) -> str:
        return (self._folder / "log").read_text(errors="replace")

    def wait(self, seconds: float = 60) -> int:
        code = self._folder / "exit"
        until(f"end of {self.name}", code.exists, seconds)
        return int(code.read_text())

    def _remove(self) -> None:
        self.wait()
        subprocess.run(
            [*self._command, "delete", "--force", self.id], check=True, timeout=60, capture_output=True
        )
        self._supervisor.communicate(timeout=60)
        subprocess.run(["umount", self._folder / "rootfs"], check=True, timeout=60)
        remove_cgroups(self.id)
