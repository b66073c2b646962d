"""The store as the controller sees it, where it is mounted: is an artifact whole, and away with it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from hibernode.artifact.store import Store
from hibernode.artifact.verify import first_problem
from hibernode.errors import IntegrityError, NotFoundError, RefusedError, UnavailableError
from hibernode.workload import CheckpointId


class Artifacts:
    """Asks a store; each call is in a thread of its own, as a store may be far away.

    :raises HibernodeError: there is no store at ``path``.
    """

    def __init__(self, path: Path) -> None:
        self._store = Store(path).open()

    def close(self) -> None:
        """Let the store go."""
        self._store.close()

    async def problem(self, id_: CheckpointId) -> str:
        """Tell what is wrong with the artifact of ``id_``, by names and sizes of files; empty for nothing.

        :raises HibernodeError: the store cannot be read now, which says nothing of the artifact.
        """
        return await asyncio.to_thread(self._problem, id_)

    async def remove(self, id_: CheckpointId) -> str:
        """Remove the artifacts of ``id_``; tells why some are kept, if any.

        :raises HibernodeError: the store cannot be written now.
        """
        return await asyncio.to_thread(self._remove, id_)

    def _problem(self, id_: CheckpointId) -> str:
        try:
            return first_problem(self._store.verify(self._store.get(id_), digests=False))
        except (NotFoundError, IntegrityError, RefusedError) as error:
            return error.message
        except OSError as error:
            raise self._away(error) from error

    def _remove(self, id_: CheckpointId) -> str:
        try:
            left = self._store.remove(id_)
        except OSError as error:
            raise self._away(error) from error
        if not left:
            return ""
        return "it is pinned" if all(one.pinned for one in left) else "it is in use"

    def _away(self, error: OSError) -> UnavailableError:
        return UnavailableError(f"store {self._store.path}: {error.strerror}", remedy="is it mounted?")
