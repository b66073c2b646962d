"""The service account that a pod runs as, as the kubelet shows it to the pod."""

from __future__ import annotations

from pathlib import Path
from typing import Final

ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")


def has_account() -> bool:
    """Tell whether this process is in a pod that has one."""
    return (ACCOUNT / "token").exists()


def own_namespace() -> str:
    """Tell in which namespace this pod is; empty outside a pod."""
    try:
        return (ACCOUNT / "namespace").read_text(encoding="utf-8").strip()
    except OSError:
        return ""
