"""A containerd of the tests' own, and containers of its ``ctr``."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import grpc

from tests.real import images
from tests.real.boxes import Box, Kit, Recipe, Runtime
from tests.real.boxes_clear import mounts_of, processes_of, remove_cgroups
from tests.real.boxes_wire import Wire
from tests.real.node import until

KUBERNETES = "k8s.io"
"""containerd's namespace for the CRI."""
CNI_PROGRAMS = Path("/usr/lib/cni")
_CONFIG = """version = 2
root = "{base}/root"
state = "{base}/state"
disabled_plugins = [
  "io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs",
  "io.containerd.internal.v1.tracing", "io.containerd.tracing.processor.v1.otlp",
  "io.containerd.nri.v1.nri",
]
[grpc]
  address = "{base}/containerd.sock"
[plugins."io.containerd.internal.v1.opt"]
  path = "{base}/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  disable_apparmor = true
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{cni}"
    conf_dir = "{base}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        BinaryName = "{runc}"
        Root = "{base}/runc-cri"
        SystemdCgroup = false
"""


class Daemon:
    """A containerd with root, state and socket below ``base``; it starts at once."""

    def __init__(self, base: Path, token: str, *, gateway: bool = False) -> None:
        self.base, self.token = base, token
        self.socket = base / "containerd.sock"
        self._imported: set[tuple[str, Path]] = set()
        runc = shutil.which("runc")
        assert runc, "no runc on this machine"
        pause = images.empty(images.pause())
        config = base / "containerd.toml"
        config.write_text(
            _CONFIG.format(base=base, pause=images.reference(pause), cni=CNI_PROGRAMS, runc=runc)
        )
        self._write_network(gateway)
        self._log = base / "containerd.log"
        with self._log.open("ab") as log:
            # In a group of its own: a terminal's Ctrl-C is for us, who need it to take the containers away.
            self._process = subprocess.Popen(
                ["containerd", "--config", config],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
            )
        self.wire = Wire(self.socket)
        until("containerd", self._answers)
        self.import_image(pause, KUBERNETES)

    def _write_network(self, gateway: bool) -> None:
        """Give pods a bridge of their own: no masquerading, no gateway, so nothing of the host is changed.

        With a gateway pods and host reach each other; the plugin turns forwarding on for it, machine-wide.
        The subnet is one of 8192 of the range for benchmarks (RFC 2544): no machine's own network is there.
        """
        number = int(self.token, 16) % 8192
        subnet = f"198.{18 + number // 4096}.{number // 16 % 256}.{number % 16 * 16}/28"
        ipam = {
            "type": "host-local",
            "dataDir": str(self.base / "cni-data"),
            "ranges": [[{"subnet": subnet}]],
            "routes": [{"dst": "0.0.0.0/0"}] if gateway else [],
        }
        bridge = {"type": "bridge", "bridge": f"hb{self.token}", "isGateway": gateway, "ipam": ipam}
        network = {"cniVersion": "0.4.0", "name": f"box-{self.token}", "plugins": [bridge]}
        (self.base / "cni").mkdir()
        (self.base / "cni/10-box.conflist").write_text(json.dumps(network))

    def _answers(self) -> bool:
        assert self._process.poll() is None, self.log()
        try:
            self.wire.call("runtime.v1.RuntimeService/Version", seconds=5)
        except grpc.RpcError:  # the CRI is not ready yet
            return False
        return True

    def log(self) -> str:
        """Give the end of the daemon's log."""
        return self._log.read_text()[-4000:]

    def ctr(self, namespace: str, *args: str | Path) -> str:
        """Run ``ctr`` to its end."""
        command = ["ctr", "--address", self.socket, "--namespace", namespace, *args]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, (command, done.stdout, done.stderr, self.log())
        return done.stdout

    def import_image(self, image: Path, namespace: str) -> str:
        """Make an image known to a namespace; return its name there."""
        name = images.reference(image)
        if (namespace, image) not in self._imported:
            self.ctr(namespace, "image", "import", "--snapshotter", "overlayfs", images.archive(image))
            self._imported.add((namespace, image))
            if namespace == KUBERNETES:
                until(f"image {name}", lambda: self._knows(name))
        return name

    def _knows(self, name: str) -> bool:
        """Whether the CRI has taken notice of an image; it learns of imports by an event."""
        answer = self.wire.call("runtime.v1.ImageService/ImageStatus", image={"image": name})
        return answer["image"] is not None

    def close(self) -> None:
        """Kill it: nothing that it would save at an orderly end is of use."""
        self.wire.close()
        self._process.kill()
        self._process.wait()


class CtrRuntime(Runtime):
    """Containers as ``ctr run`` makes them. It cannot choose the user or the host name."""

    kind = "ctr"

    def __init__(self, kit: Kit) -> None:
        super().__init__(kit)
        self.daemon = kit.daemon()
        self.namespace = f"box-{kit.token}"

    def _start(self, recipe: Recipe) -> Box:
        assert recipe.uid == 0, "ctr run cannot choose the user (containerd 1.6)"
        assert not recipe.tty, "ctr run --detach has no terminal"
        assert not recipe.bounding, "ctr run gives a capability in all sets"
        folder, id_ = self.kit.folder(recipe.name), self.kit.new_id()
        options: list[str | Path] = ["--detach", "--snapshotter", "overlayfs", "--pid-file", folder / "pid"]
        options += ["--runc-root", self.kit.base / "runc-ctr", "--log-uri", f"file://{folder / 'log'}"]
        for name, value in recipe.env.items():
            options += ["--env", f"{name}={value}"]
        for host, inside, mode in recipe.binds:
            options += ["--mount", f"type=bind,src={host},dst={inside},options=rbind:{mode}"]
        if recipe.seccomp is not None:
            options += ["--seccomp", "--seccomp-profile", recipe.seccomp]
        if recipe.memory is not None:
            options += ["--memory-limit", str(recipe.memory)]
        if recipe.readonly_root:
            options.append("--read-only")
        image = self.daemon.import_image(recipe.image, self.namespace)
        self.daemon.ctr(self.namespace, "run", *options, image, id_, *recipe.argv)
        return CtrBox(recipe, id_, folder, self)


class CtrBox(Box):
    """A container of ``ctr``."""

    def __init__(self, recipe: Recipe, id_: str, folder: Path, runtime: CtrRuntime) -> None:
        super().__init__(recipe, id_, int((folder / "pid").read_text()))
        self._folder, self._daemon, self._namespace = folder, runtime.daemon, runtime.namespace

    def log(self) -> str:
        return (self._folder / "log").read_text(errors="replace")

    def wait(self, seconds: float = 60) -> int:
        answer = self._daemon.wire.call(
            "containerd.services.tasks.v1.Tasks/Wait",
            namespace=self._namespace,
            seconds=seconds,
            container_id=self.id,
        )
        code: int = answer["exit_status"]
        return code

    def _remove(self) -> None:
        self._daemon.ctr(self._namespace, "task", "delete", "--force", self.id)
        self._daemon.ctr(self._namespace, "container", "delete", self.id)
        until(f"end of the shim of {self.name}", lambda: not processes_of(self.id) and not mounts_of(self.id))
        remove_cgroups(self.id)
