"""A real etcd and kube-apiserver on loopback: RBAC on, service account tokens, nothing outside ``base``."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kubernetes.aio.client import ApiClient, Configuration

from tests.cluster.pki import Authority
from tests.cluster.program import PROGRAMS, Program
from tests.real.node import free_port

ISSUER = "https://kubernetes.default.svc"
"""The issuer, and so the audience, of service account tokens."""
REQUEST_SECONDS = 60.0
_MANAGER = "hibernode-tests"
_RBAC = "/apis/rbac.authorization.k8s.io/v1"


@dataclass(frozen=True, slots=True)
class Answer:
    """What the server said: the HTTP status and the decoded object."""

    status: int
    body: dict[str, Any]

    @property
    def name(self) -> str:
        """Tell the name of the object."""
        return str(self.body["metadata"]["name"])

    @property
    def version(self) -> str:
        """Tell the resource version of the object or list."""
        return str(self.body["metadata"]["resourceVersion"])


class Kube:
    """A control plane without controllers; it starts at once.

    Until ``start_controllers`` a deleted namespace stays in Terminating and a Job makes no pods. Pods need no
    service account: ``service_accounts`` turns their admission on, for a cluster whose pods run.
    """

    def __init__(
        self,
        base: Path,
        *,
        address: str = "127.0.0.1",
        port: int | None = None,
        services: str = "10.96.0.0/16",
        service_accounts: bool = False,
    ) -> None:
        self.base, self._address, self._services = base, address, services
        self.authority = Authority(base / "pki")
        self.authority.issue(
            "apiserver",
            "kube-apiserver",
            addresses=("IP:127.0.0.1", f"IP:{address}", "DNS:localhost", "DNS:kubernetes.default.svc"),
        )
        self.signing_pair = self.authority.issue("sa", "service-accounts")
        self.port = port or free_port()
        self.url = f"https://{address}:{self.port}"
        self._etcd_url = f"http://127.0.0.1:{free_port()}"
        self.admin = self.user("admin", "admin", "system:masters")
        self._context = ssl.create_default_context(cafile=str(self.authority.crt))
        self._context.load_cert_chain(*self.pair("admin"))
        self.etcd = Program(base / "etcd.log", self._etcd_command())
        self.api = Program(base / "kube-apiserver.log", self._api_command(service_accounts))
        self._controllers_port = free_port()
        self.controllers = Program(base / "kube-controller-manager.log", self._controllers_command())
        began = time.monotonic()
        try:
            self.etcd.start(lambda: self.answers(f"{self._etcd_url}/health"))
            self.start_api()
        except BaseException:
            self.close()
            raise
        self.start_seconds = time.monotonic() - began

    def pair(self, name: str) -> tuple[str, str]:
        """Name the certificate and key files of a user."""
        return str(self.authority.folder / f"{name}.crt"), str(self.authority.folder / f"{name}.key")

    def serving(self) -> list[str]:
        """Give the options of a program of the control plane that is served on loopback."""
        certificate, key = self.pair("apiserver")
        return [f"--tls-cert-file={certificate}", f"--tls-private-key-file={key}"]

    def user(self, file: str, name: str, group: str | None = None, addresses: tuple[str, ...] = ()) -> Path:
        """Make a certificate for a user of a group, and give the path of a kubeconfig with it."""
        certificate, key = self.authority.issue(file, name, group, addresses)
        user = {"client-certificate": str(certificate), "client-key": str(key)}
        return self.authority.kubeconfig(file, self.url, user)

    def _etcd_command(self) -> list[str | Path]:
        peer = f"http://127.0.0.1:{free_port()}"
        return [
            PROGRAMS / "etcd",
            "--unsafe-no-fsync",  # the data outlives the server, not the machine
            f"--data-dir={self.base / 'etcd'}",
            f"--listen-client-urls={self._etcd_url}",
            f"--advertise-client-urls={self._etcd_url}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
        ]

    def _api_command(self, service_accounts: bool) -> list[str | Path]:
        admin_certificate, admin_key = self.pair("admin")
        command: list[str | Path] = [
            PROGRAMS / "kube-apiserver",
            f"--etcd-servers={self._etcd_url}",
            f"--bind-address={self._address}",
            f"--secure-port={self.port}",
            f"--advertise-address={self._address}",
            "--endpoint-reconciler-type=none",  # it refuses to publish a loopback address
            f"--cert-dir={self.base / 'pki'}",
            *self.serving(),
            f"--client-ca-file={self.authority.crt}",
            f"--service-account-issuer={ISSUER}",
            f"--service-account-key-file={self.signing_pair[0]}",
            f"--service-account-signing-key-file={self.signing_pair[1]}",
            f"--kubelet-client-certificate={admin_certificate}",
            f"--kubelet-client-key={admin_key}",
            "--kubelet-preferred-address-types=InternalIP",
            "--authorization-mode=Node,RBAC",
            f"--service-cluster-ip-range={self._services}",
            "--allow-privileged=true",
        ]
        if not service_accounts:
            command.append("--disable-admission-plugins=ServiceAccount")
        return command

    def _controllers_command(self) -> list[str | Path]:
        return [
            PROGRAMS / "kube-controller-manager",
            f"--kubeconfig={self.user('controller-manager', 'system:kube-controller-manager')}",
            "--bind-address=127.0.0.1",
            f"--secure-port={self._controllers_port}",
            "--port=0",
            *self.serving(),
            "--leader-elect=false",
            "--use-service-account-credentials=true",
            f"--service-account-private-key-file={self.signing_pair[1]}",
            f"--root-ca-file={self.authority.crt}",
            f"--flex-volume-plugin-dir={self.base / 'plugins'}",  # it makes this folder
        ]

    # Up and down.

    def start_api(self) -> None:
        """Start the API server, on the port and the data that it had before, and wait until it is ready."""
        self.api.start(lambda: self.answers(f"{self.url}/readyz"))

    def start_controllers(self) -> None:
        """Start the controller manager: Jobs get pods, what has no owner any more is removed."""
        self.controllers.start(lambda: self.answers(f"https://127.0.0.1:{self._controllers_port}/healthz"))

    def stop_api(self) -> None:
        """Kill the API server: every connection breaks, new ones are refused. The data stays."""
        self.api.stop()

    @contextlib.contextmanager
    def api_frozen(self) -> Iterator[None]:
        """Let the API server hang for a while: connections are taken and nothing is answered."""
        os.kill(self.api.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.api.pid, os.WSTOPPED)  # on a busy machine some threads stop later
        try:
            yield
        finally:
            os.kill(self.api.pid, signal.SIGCONT)

    def close(self) -> None:
        """End everything; the files stay."""
        for program in reversed(self.programs()):
            program.stop()

    def programs(self) -> list[Program]:
        """List what runs or could."""
        return [self.etcd, self.api, self.controllers]

    def answers(self, url: str) -> bool:
        """Tell whether a health address says that all is well."""
        try:
            context = self._context if url.startswith("https:") else None
            with urllib.request.urlopen(url, timeout=5, context=context) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def resident(self) -> int:
        """Tell the resident memory of what runs in bytes."""
        return sum(program.resident() for program in self.programs())

    # What has expired.

    def compact(self) -> None:
        """Drop the history of the store: a list that is half read cannot be continued (410)."""
        # A write first: the newest version is never dropped.
        self.make("/api/v1/namespaces/default/configmaps", {"metadata": {"generateName": "newer-"}})
        key = {"key": "AA==", "range_end": "AA==", "count_only": True}
        revision = self._etcd("kv/range", key)["header"]["revision"]
        self._etcd("kv/compaction", {"revision": revision, "physical": True})

    def expire(self) -> None:
        """Make every resource version of now too old for a watch (410): compact, and start a new server.

        A server answers watches from memory that reaches back to its start, whatever the store still has.
        """
        self.compact()
        self.stop_api()
        self.start_api()

    def _etcd(self, method: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(f"{self._etcd_url}/v3/{method}", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=REQUEST_SECONDS) as answer:
            content: dict[str, Any] = json.load(answer)
            return content

    # Clients.

    def request(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        token: str | None = None,
        content_type: str = "application/json",
        seconds: float = REQUEST_SECONDS,
    ) -> Answer:
        """Send one request as the administrator, or as whoever has the token; OSError when nobody answers."""
        context = self._context
        headers = {"Accept": "application/json", "Content-Type": content_type}
        if token is not None:
            context = ssl.create_default_context(cafile=str(self.authority.crt))
            headers["Authorization"] = f"Bearer {token}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=seconds, context=context) as answer:
                return Answer(answer.status, json.load(answer))
        except urllib.error.HTTPError as error:
            with error:
                return Answer(error.code, json.loads(error.read() or b"{}"))

    def make(self, path: str, body: object) -> Answer:
        """Create an object as the administrator; anything but 201 is a failure."""
        answer = self.request("POST", path, body)
        assert answer.status == 201, answer
        return answer

    def configuration(self, token: str | None = None) -> Configuration:
        """Tell a client who it is: the administrator, or whoever has the token."""
        configuration = Configuration(host=self.url, ssl_ca_cert=str(self.authority.crt))
        if token is None:
            configuration.cert_file, configuration.key_file = self.pair("admin")
        else:
            configuration.api_key["BearerToken"] = f"Bearer {token}"
        return configuration

    def client(self, token: str | None = None) -> ApiClient:
        """Give a client of the administrator, or of whoever has the token; close it (async with)."""
        return ApiClient(self.configuration(token))

    def namespace(self, name: str) -> str:
        """Make a namespace; it goes with the server."""
        return self.make("/api/v1/namespaces", {"metadata": {"name": name}}).name

    def account(self, namespace: str, name: str) -> str:
        """Make a service account, bound to nothing, and give a token of it."""
        self.make(f"/api/v1/namespaces/{namespace}/serviceaccounts", {"metadata": {"name": name}})
        return self.token(namespace, name)

    def token(self, namespace: str, name: str, seconds: int = 3600) -> str:
        """Ask for a token of a service account that is there, good for ``seconds`` (600 or more)."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token"
        spec = {"audiences": [ISSUER], "expirationSeconds": seconds}
        return str(self.make(path, {"spec": spec}).body["status"]["token"])

    def bind(self, namespace: str, account: str, role: str | list[dict[str, Any]]) -> None:
        """Bind an account of the namespace to rules inside it, or to a cluster role everywhere.

        Authorization follows within moments, not at once.
        """
        subjects = [{"kind": "ServiceAccount", "name": account, "namespace": namespace}]
        reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role}
        folder = _RBAC
        if not isinstance(role, str):
            folder = f"{_RBAC}/namespaces/{namespace}"
            made = self.make(f"{folder}/roles", {"metadata": {"generateName": f"{account}-"}, "rules": role})
            reference |= {"kind": "Role", "name": made.name}
        kind = "clusterrolebindings" if isinstance(role, str) else "rolebindings"
        self.make(
            f"{folder}/{kind}",
            {"metadata": {"generateName": f"{account}-"}, "subjects": subjects, "roleRef": reference},
        )

    # Manifests.

    def kubectl(self, *arguments: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run kubectl as the administrator."""
        command: list[str | Path] = [PROGRAMS / "kubectl", f"--kubeconfig={self.admin}"]
        command += [f"--cache-dir={self.base / 'kubectl'}", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0 or not check, f"kubectl {arguments}: {done.stderr}"
        return done

    def apply(self, path: Path, *, dry_run: bool = False) -> list[str]:
        """Apply a file or a kustomization on the server's side; list what it holds as ``kind.group/name``.

        Definitions of custom resources can be used on return. A dry run is the server's: it checks all and
        stores nothing, so namespaces and definitions that the rest needs must be there already.
        """
        kustomization = (path / "kustomization.yaml").exists()
        command = ["apply", "--server-side", "--force-conflicts", f"--field-manager={_MANAGER}", "-o", "name"]
        if dry_run:
            command.append("--dry-run=server")
        names = self.kubectl(*command, "-k" if kustomization else "-f", path).stdout.split()
        definitions = [name for name in names if name.startswith("customresourcedefinition")]
        if definitions and not dry_run:
            self.kubectl("wait", "--for=condition=Established", "--timeout=60s", *definitions)
        return names
