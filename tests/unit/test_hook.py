"""The work between CRIU's last image and the thaw: the script is run as CRIU runs it, without a CRIU."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from asyncio.subprocess import Process

import pytest

from hibernode.criu.hook import FAILED, FrozenHook

AGENT = """
import asyncio, sys
from hibernode.criu.hook import FrozenHook

async def work():
    print("working", flush=True)
    await asyncio.sleep(3600)

async def main():
    async with FrozenHook(work) as hook:
        print(hook.argument, flush=True)
        await asyncio.sleep(3600)

asyncio.run(main())
"""


async def start(argument: str, action: str | None = "post-dump") -> Process:
    """Start the script as CRIU does: by its path, the moment in the environment."""
    env = {"PATH": os.environ["PATH"]} if action is None else {"CRTOOLS_SCRIPT_ACTION": action}
    return await asyncio.create_subprocess_exec(argument, env=env, close_fds=True)


async def nothing() -> None:
    """Do no work."""


async def never() -> None:
    """Fail if it is called."""
    raise AssertionError("the work was called")


@pytest.mark.parametrize(
    "action",
    ["pre-dump", "network-lock", "network-unlock", "post-dump-x", "setup-namespaces", "", None],
)
async def test_other_moments_pass_at_once(action: str | None) -> None:
    """CRIU calls the script at many moments; only one of them is ours."""
    async with FrozenHook(never) as hook:
        assert await (await start(hook.argument, action)).wait() == 0
    assert hook.error is None


async def test_criu_waits_for_the_work() -> None:
    """The script ends, with 0, when the work has ended and not before."""
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        begun.set()
        await go_on.wait()

    async with FrozenHook(work) as hook:
        script = await start(hook.argument)
        await begun.wait()
        assert script.returncode is None
        go_on.set()
        assert await script.wait() == 0
    assert hook.error is None


async def test_work_that_fails_makes_criu_fail() -> None:
    """The code is not 0, and what was raised is kept for whoever runs CRIU."""
    error = OSError("no space")

    async def work() -> None:
        raise error

    async with FrozenHook(work) as hook:
        assert await (await start(hook.argument)).wait() == FAILED
    assert hook.error is error


async def test_the_work_is_done_once() -> None:
    """A second call, which CRIU never makes, starts nothing."""
    calls: list[int] = []

    async def work() -> None:
        calls.append(1)

    async with FrozenHook(work) as hook:
        assert await (await start(hook.argument)).wait() == 0
        second = await start(hook.argument)
    assert await second.wait() != 0
    assert calls == [1]


async def test_a_failure_of_criu_ends_the_work() -> None:
    """The work is cancelled and waited for, and a script that is left ends with an error."""
    begun, ended = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.set()

    scripts: list[Process] = []

    async def dump() -> None:
        async with FrozenHook(work) as hook:
            scripts.append(await start(hook.argument))
            await begun.wait()
            raise RuntimeError("criu failed")

    with pytest.raises(RuntimeError, match="criu"):
        await dump()
    assert ended.is_set()
    assert await scripts[0].wait() != 0


async def test_cancelling_the_dump_cancels_the_work() -> None:
    """As with a failure: nothing goes on behind whoever undoes the dump."""
    begun, ended = asyncio.Event(), asyncio.Event()
    scripts: list[Process] = []

    async def work() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def dump() -> None:
        async with FrozenHook(work) as hook:
            scripts.append(await start(hook.argument))
            await asyncio.Event().wait()

    task = asyncio.create_task(dump())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()
    assert await scripts[0].wait() != 0


async def test_work_that_is_under_way_is_waited_for_when_criu_is_gone() -> None:
    """A CRIU that was killed takes its script along; the work still ends before the context does."""
    begun, go_on, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def work() -> None:
        begun.set()
        await go_on.wait()
        ended.set()

    async with FrozenHook(work) as hook:
        script = await start(hook.argument)
        await begun.wait()
        script.kill()
        assert await script.wait() == -signal.SIGKILL
        asyncio.get_running_loop().call_soon(go_on.set)
    assert ended.is_set()
    assert hook.error is None


async def test_nothing_stays_open() -> None:
    """Pipes and script go with the context, used or not."""
    before = os.listdir("/proc/self/fd")
    async with FrozenHook(nothing) as hook:
        path = hook.argument
        assert await (await start(path)).wait() == 0
    async with FrozenHook(never):
        pass
    assert os.listdir("/proc/self/fd") == before
    with pytest.raises(FileNotFoundError):
        await start(path)


async def test_nothing_is_handed_on_to_children() -> None:
    """A child that kept an end of the pipes would keep the script waiting after the agent's end."""

    def inherited() -> str:
        """List what a child gets that was told to close nothing."""
        return subprocess.run(
            ["ls", "/proc/self/fd"], check=True, capture_output=True, close_fds=False, text=True
        ).stdout

    before = inherited()
    async with FrozenHook(nothing):
        assert inherited() == before


def test_the_death_of_the_agent_ends_the_script() -> None:
    """With an error, so that CRIU gives the dump up and lets the tree go on."""
    with subprocess.Popen([sys.executable, "-c", AGENT], stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout is not None
        argument = agent.stdout.readline().strip()
        with subprocess.Popen([argument], env={"CRTOOLS_SCRIPT_ACTION": "post-dump"}) as script:
            assert agent.stdout.readline() == "working\n"
            pidfd = os.pidfd_open(script.pid)
            assert select.select([pidfd], [], [], 0)[0] == []
            agent.kill()
            assert script.wait(30) != 0
            os.close(pidfd)
