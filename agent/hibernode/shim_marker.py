"""The restore marker: written before the worker runs, and removed, with the rights that the worker has.

Like the shim, standard library and modules of :mod:`hibernode.host` that need no more.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from typing import Any, Final

from hibernode.host import inroot, linux

EXISTED: Final = 3
ODD: Final = 4
"""Exit codes of the child that found the marker there already: a file of the worker's own, which is then not
ours to remove, or something that is no marker."""

CONTENT: Final = b"restored\n"


class Marker:
    """One restore's marker: ``path``, the worker's ``uid``, ``gid`` and ``groups``, and ``capabilities``.

    The last is a mask of those that the worker may have where it goes. ``enter`` is called first in each
    child: it makes it see the container's files.
    """

    def __init__(self, spec: dict[str, Any], enter: Callable[[], None] | None) -> None:
        self.spec = spec
        self.enter = enter
        self.written = False

    def write(self) -> bool:
        """Write the marker, if it is not there; whether it is there now."""
        code = self._as_worker(self._create)
        if code == ODD:
            # A link or a pipe would not be a marker: it goes, as the worker could make it go.
            self._as_worker(self._unlink)
            code = self._as_worker(self._create)
        self.written = code == 0
        return code in (0, EXISTED)

    def remove(self) -> None:
        """Take it away again, if it was written here, or by a shim that cannot do so any more."""
        if self.written:
            self._as_worker(self._unlink)

    def _as_worker(self, act: Callable[[int, str], int]) -> int:
        """Do something to the marker in a child that has no more rights than the worker; its exit code.

        The path comes from the worker's environment and is hostile. It is walked as the worker's user, and
        through no link of /proc: in a container that sees the node's /proc, /proc/PID/root leads out of it.
        Nothing is imported in the child, where files may be the container's.
        """
        child = os.fork()
        if child == 0:
            try:
                if self.enter is not None:
                    self.enter()
                os.setgroups(self.spec["groups"])
                os.setresgid(*[self.spec["gid"]] * 3)
                os.setresuid(*[self.spec["uid"]] * 3)
                # Another user than root has lost all of them by now, and root none.
                linux.set_capabilities(self.spec["capabilities"])
                linux.set_undumpable()  # who may trace it would have our descriptors
                os.umask(0o022)
                root = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
                above, _, name = self.spec["path"].rpartition("/")
                os._exit(act(inroot.open_below(root, above or "/", os.O_PATH | os.O_DIRECTORY), name))
            except BaseException:  # noqa: BLE001 - this child must never go on as a second shim
                os._exit(1)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def _create(self, above: int, name: str) -> int:
        try:
            fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644, dir_fd=above)
        except FileExistsError:
            return self._existing(above, name)
        try:
            os.write(fd, CONTENT)
        except OSError:  # a full disk: an empty one is a marker too
            os.unlink(name, dir_fd=above)
            raise
        return 0

    def _existing(self, above: int, name: str) -> int:
        """Tell what is there already; one that a shim which was killed has left is ours from now on."""
        found = os.stat(name, dir_fd=above, follow_symlinks=False)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != self.spec["uid"]:
            return ODD
        try:
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=above)
        except PermissionError:
            return EXISTED
        return 0 if os.read(fd, len(CONTENT) + 1) == CONTENT else EXISTED

    def _unlink(self, above: int, name: str) -> int:
        os.unlink(name, dir_fd=above)
        return 0
