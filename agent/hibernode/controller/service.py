"""``hibernode controller``: waits to lead, follows DynamoCheckpoints and Jobs, looks at what changed.

A controller that waits costs a Lease read now and then. One that leads and loses the Lease, or cannot renew
it, ends its work before the Lease is over for the others; whatever it was in the middle of, another goes on
with, since all that counts is in the objects.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final

from hibernode import __version__
from hibernode.controller.artifacts import Artifacts
from hibernode.controller.queue import WorkQueue
from hibernode.controller.reconcile import HeldError, Reconciler
from hibernode.controller.shelf import Checkpoints, Jobs
from hibernode.controller.writes import Writes
from hibernode.errors import HibernodeError, UnavailableError
from hibernode.health import Check, DegradedError, Health
from hibernode.kube import names
from hibernode.kube.account import own_namespace
from hibernode.kube.api import CONFLICT, KubeApi, KubeStatusError, load_configuration
from hibernode.kube.events import EventWriter
from hibernode.kube.follow import Follower, Listing
from hibernode.kube.lease import Lease
from hibernode.metrics import Metrics, Reading
from hibernode.server import PublicServer
from hibernode.settings import Settings

log = logging.getLogger("hibernode.controller")

LEASE: Final = "hibernode-controller"
COMPONENT: Final = "hibernode-controller"
LOOK_SECONDS: Final = 60.0
"""One look: some calls, each of which has its own deadline."""

START_SECONDS: Final = 2.0
"""Before another try to list, where that failed."""


class Controller:
    """One process of it; ``holder`` is its name in the Lease."""

    def __init__(self, settings: Settings, api: KubeApi, holder: str = "") -> None:
        self.settings, self.api = settings, api
        self.ours = settings.controller
        self.queue = WorkQueue()
        self.looks = dict.fromkeys(("done", "again", "held", "failed"), 0.0)
        self.leads = False
        self._trouble = ""  # why the Lease cannot be asked for
        self._events = EventWriter(api, COMPONENT)
        self._artifacts: Artifacts | None = None
        self._listed = asyncio.Event()
        self._checkpoints, self._jobs, self._followers = self._fresh()
        self._lease: Lease | None = None
        if self.ours.election:
            holder = holder or f"{os.uname().nodename}_{uuid.uuid4()}"
            namespace = self.ours.lease_namespace or own_namespace() or "default"
            self._lease = Lease(api, namespace, LEASE, holder, seconds=self.ours.lease_seconds)

    async def run(self) -> None:
        """Lead whenever it is our turn, for ever; at the end the Lease is given back."""
        if "store" in (self.ours.verify, self.ours.cleanup):
            self._artifacts = await asyncio.to_thread(Artifacts, self.settings.store.path)
        try:
            while True:
                await self._elected()
                log.info("leading")
                try:
                    await self._lead()
                finally:
                    self.leads = False
                log.warning("not leading any more")
        finally:
            if self._lease is not None:
                await self._lease.release()
            if self._artifacts is not None:
                self._artifacts.close()

    # who leads ----------------------------------------------------------------------------------------

    async def _elected(self) -> None:
        while self._lease is not None and not await self._ask(self._lease):  # noqa: ASYNC110
            await asyncio.sleep(self.ours.lease_seconds / 5)
        self.leads = True

    async def _ask(self, lease: Lease) -> bool:
        try:
            asked = await lease.ask()
        except UnavailableError as error:
            self._trouble = error.message
            log.warning("%s", error.message)
            return False
        self._trouble = ""
        return asked

    async def _renew(self) -> None:
        """Renew the Lease until it is lost."""
        if self._lease is None:
            await asyncio.Event().wait()
        else:
            while self._lease.left():
                # Its end is not waited for: what has not answered by then has not renewed it.
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._lease.left()):
                        await asyncio.sleep(self.ours.lease_seconds / 5)
                        await self._ask(self._lease)

    async def _lead(self) -> None:
        """Work until the Lease is lost."""
        self._checkpoints, self._jobs, self._followers = self._fresh()
        work = [
            self._renew(),
            self._follow(),
            self._resync(),
            *(self._work() for _ in range(self.ours.workers)),
        ]
        tasks = [asyncio.create_task(one) for one in work]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks[1:]:
                if task.done():
                    task.result()  # only the first one ends without a fault
        finally:
            self.leads = False
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for follower in self._followers:
                await follower.stop()
            self.queue.close()

    # what is followed ---------------------------------------------------------------------------------

    def _fresh(self) -> tuple[Checkpoints, Jobs, list[Follower]]:
        """Begin with nothing known and nothing to do."""
        self.queue.close()
        self.queue = WorkQueue()
        self._listed.clear()
        checkpoints, jobs = Checkpoints(self.queue.add, self._wanted), Jobs(self.queue.add, self._wanted)
        where = f"/namespaces/{self.ours.namespace}" if self.ours.namespace else ""
        listings = (
            (
                Listing(
                    f"/apis/{names.GROUP}/{names.VERSION}{where}/{names.PLURAL}",
                    "DynamoCheckpoints",
                    missing="apply daemonset/crds/dynamocheckpoint.yaml",
                ),
                checkpoints,
            ),
            (Listing(f"/apis/batch/v1{where}/jobs", "checkpoint Jobs", labels=names.NAME_LABEL), jobs),
        )
        return checkpoints, jobs, [Follower(self.api, listing, sink) for listing, sink in listings]

    def _wanted(self, namespace: str) -> bool:
        return namespace not in self.ours.excluded_namespaces

    async def _follow(self) -> None:
        """List all, let the work begin, and follow.

        Not before: who has the same identity decides what is made, and what may be removed.
        """
        for follower in self._followers:
            while True:
                try:
                    await follower.start()
                except UnavailableError as error:
                    log.warning("%s", error)
                    await asyncio.sleep(START_SECONDS)
                else:
                    break
        self._listed.set()
        await asyncio.Event().wait()

    async def _resync(self) -> None:
        """Look at everything now and then, whatever the watches have said."""
        while True:
            await asyncio.sleep(self.ours.resync_seconds)
            for key in self._checkpoints.keys():  # noqa: SIM118 - no mapping
                self.queue.add(key)

    # work ---------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        writes = Writes(self.api)
        reconciler = Reconciler(writes, self._events, self.settings, self._checkpoints, self._artifacts)
        queue = self.queue
        await self._listed.wait()
        while True:
            key = await queue.take()
            left = self._lease.left() if self._lease is not None else LOOK_SECONDS
            try:
                async with asyncio.timeout(min(left, LOOK_SECONDS)):
                    again = await reconciler.look(*key)
            except HeldError as error:
                self._ended("held", key, str(error.message))
                queue.failed(key)
            except KubeStatusError as error:
                conflict = error.code == CONFLICT
                self._ended("again" if conflict else "failed", key, str(error))
                queue.failed(key)
            except (HibernodeError, TimeoutError) as error:
                self._ended("failed", key, str(error) or "no time is left for it")
                queue.failed(key)
            except Exception:
                log.exception("%s/%s: the look at it failed", *key)
                self.looks["failed"] += 1
                queue.failed(key)
            else:
                self.looks["done"] += 1
                queue.done(key, again)

    def _ended(self, result: str, key: tuple[str, str], why: str) -> None:
        self.looks[result] += 1
        level = logging.WARNING if result == "failed" else logging.INFO
        log.log(level, "%s/%s: %s", *key, why)

    # what is shown ------------------------------------------------------------------------------------

    async def check(self) -> str:
        """Say for health whether it works: leading with lists that are the truth, or waiting to lead.

        :raises DegradedError: the API server has not been heard.
        """
        if not self.leads and self._trouble:
            raise DegradedError(f"waits to lead, but {self._trouble}")
        if not self.leads:
            return "waits to lead"
        for follower in self._followers:
            try:
                follower.check()
            except UnavailableError as error:
                raise DegradedError(error.message) from error
        return "leads"

    def reading(self) -> Reading:
        """Read the metrics."""
        return {
            "hibernode_controller_leads": float(self.leads),
            "hibernode_controller_objects": self._checkpoints.phases(),
            "hibernode_controller_queue_depth": float(len(self.queue)),
            "hibernode_controller_looks_total": dict(self.looks),
            "hibernode_controller_list_age_seconds": max(one.age() for one in self._followers),
            "hibernode_controller_api_retries_total": float(self.api.counters.retries),
            "hibernode_controller_dropped_events_total": float(self._events.dropped),
        }


@asynccontextmanager
async def _served(settings: Settings, controller: Controller) -> AsyncIterator[None]:
    """Serve health and metrics meanwhile."""
    metrics, health = Metrics(), Health()
    metrics.add_collector("controller", controller.reading)
    health.add(Check("controller", controller.check))
    server = PublicServer(settings, metrics, health)
    await server.start()
    try:
        yield
    finally:
        await server.stop()


async def main(settings: Settings) -> None:
    """Run a controller until SIGTERM or SIGINT.

    :raises HibernodeError: there is no way to the API server, or the address or the store cannot be had.
    """
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    api = KubeApi(await load_configuration(settings.kubernetes.kubeconfig))
    try:
        controller = Controller(settings, api)
        async with _served(settings, controller):
            log.info("hibernode controller %s", __version__)
            tasks = [asyncio.create_task(controller.run()), asyncio.create_task(stop.wait())]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            if isinstance(ends[0], Exception):
                raise ends[0]
    finally:
        await api.close()
