"""Certificates and kubeconfigs for a control plane of the tests' own, made with openssl."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

_CONFIG = "[req]\ndistinguished_name = dn\n[dn]\n"


class Authority:
    """A certificate authority in ``folder``; its certificate is ``crt``."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, mode=0o700)
        self.folder = folder
        self.crt = folder / "ca.crt"
        self.key = folder / "ca.key"
        (folder / "openssl.cnf").write_text(_CONFIG)
        self._request(
            "ca", "/CN=hibernode-tests", "basicConstraints=critical,CA:TRUE", "keyUsage=critical,keyCertSign"
        )

    def _request(self, name: str, subject: str, *extensions: str, signed: bool = False) -> None:
        """Make a key and a certificate for it, good for a month."""
        command: list[str | Path] = ["openssl", "req", "-x509", "-new", "-days", "30"]
        command += ["-config", self.folder / "openssl.cnf"]
        command += ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", subject]
        command += ["-keyout", self.folder / f"{name}.key", "-out", self.folder / f"{name}.crt"]
        if signed:
            command += ["-CA", self.crt, "-CAkey", self.key]
        for extension in (*extensions, "subjectKeyIdentifier=hash"):
            command += ["-addext", extension]
        subprocess.run(command, check=True, capture_output=True)

    def issue(
        self, name: str, user: str, group: str | None = None, addresses: tuple[str, ...] = ()
    ) -> tuple[Path, Path]:
        """Make NAME.crt and NAME.key for a user of a group, for a server too where it has addresses."""
        extensions = [
            "basicConstraints=critical,CA:FALSE",
            "keyUsage=critical,digitalSignature",
            "authorityKeyIdentifier=keyid",
            "extendedKeyUsage=clientAuth,serverAuth",
        ]
        if addresses:
            extensions.append("subjectAltName=" + ",".join(addresses))
        subject = (f"/O={group}" if group else "") + f"/CN={user}"
        self._request(name, subject, *extensions, signed=True)
        return self.folder / f"{name}.crt", self.folder / f"{name}.key"

    def kubeconfig(self, name: str, url: str, user: dict[str, str]) -> Path:
        """Write NAME.kubeconfig for a user: ``client-certificate`` and ``client-key``, or ``token``."""
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {"name": "tests", "cluster": {"server": url, "certificate-authority": str(self.crt)}}
            ],
            "users": [{"name": name, "user": user}],
            "contexts": [{"name": "tests", "context": {"cluster": "tests", "user": name}}],
            "current-context": "tests",
        }
        path = self.folder / f"{name}.kubeconfig"
        path.touch(mode=0o600)
        path.write_text(json.dumps(content))
        return path
