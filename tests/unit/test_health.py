"""Health: deadlines, sharing, and what a failing check is worth."""

from __future__ import annotations

import asyncio
import threading

import pytest

from hibernode.errors import StorageError
from hibernode.health import Check, DegradedError, Health, Probe, State, in_thread, worst


async def fine() -> str:
    return "all there"


async def degraded() -> str:
    raise DegradedError("polling")


async def broken() -> str:
    raise StorageError("no space", remedy="make room")


async def silent() -> str:
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ("run", "required", "state", "message"),
    [
        pytest.param(fine, True, State.OK, "all there", id="a check that returns is ok"),
        pytest.param(degraded, True, State.DEGRADED, "polling", id="a check can say degraded"),
        pytest.param(
            broken, True, State.FAIL, "no space\n  make room", id="any exception fails, remedy included"
        ),
        pytest.param(silent, True, State.FAIL, "ZeroDivisionError", id="an exception without words is named"),
        pytest.param(
            broken, False, State.DEGRADED, "no space\n  make room", id="what is not required only degrades"
        ),
    ],
)
async def test_a_check_has_one_of_three_states_and_a_reason(run, required, state, message):
    """The state follows from how the check ends."""
    health = Health()
    health.add(Check("one", run, required=required))
    (result,) = await health.results()
    assert (result.name, result.state, result.message) == ("one", state, message)


def test_names_are_unique():
    """A name stands for one check."""
    health = Health()
    health.add(Check("one", fine))
    with pytest.raises(ValueError, match="one"):
        health.add(Check("one", fine))


async def test_the_sum_is_the_worst():
    """Degraded is not dead; one failure fails the whole."""
    health = Health()
    assert worst(await health.results()) is State.OK
    health.add(Check("a", fine))
    health.add(Check("b", degraded))
    assert worst(await health.results()) is State.DEGRADED
    health.add(Check("c", broken))
    assert worst(await health.results()) is State.FAIL


async def test_a_hung_check_is_reported_and_not_started_again():
    """However often it is asked, it runs once, and the others are answered."""
    started: list[int] = []
    release = threading.Event()

    def hang() -> str:
        started.append(1)
        release.wait(60)
        return "back"

    health = Health()
    health.add(Check("hung", in_thread(hang), deadline=0.05))
    health.add(Check("fine", fine))
    try:
        for _ in range(5):
            hung, other = await health.results()
            assert (hung.state, other.state) == (State.FAIL, State.OK)
            assert hung.message.startswith("no answer for")
        assert started == [1]
    finally:
        release.set()
    async with asyncio.timeout(30):
        while (await health.results())[0].state is not State.OK:
            await asyncio.sleep(0.01)


async def test_many_askers_share_one_run():
    """A thousand probes at once and a thousand after them cost one run while the answer is fresh."""
    runs: list[int] = []

    async def count() -> int:
        runs.append(1)
        await asyncio.sleep(0)
        return len(runs)

    probe = Probe(count, deadline=30, keep=3600)
    answers = await asyncio.gather(*(probe.ask() for _ in range(1000)))
    answers += [await probe.ask() for _ in range(1000)]
    assert {answer.value for answer in answers} == {1}
    stale = Probe(count, deadline=30, keep=0)
    assert [(await stale.ask()).value for _ in range(3)] == [2, 3, 4]


async def test_an_asker_that_goes_away_stops_nobody_else():
    """The run goes on when the probe that began it is cut off."""
    gate = asyncio.Event()

    async def wait() -> str:
        await gate.wait()
        return "done"

    probe = Probe(wait, deadline=30, keep=0)
    first = asyncio.create_task(probe.ask())
    second = asyncio.create_task(probe.ask())
    await asyncio.sleep(0)
    first.cancel()
    gate.set()
    assert (await second).value == "done"


async def test_closing_gives_up_on_what_hangs():
    """A stopped agent still answers, and says that it stops."""

    async def wait() -> str:
        await asyncio.Event().wait()
        return ""

    health = Health()
    health.add(Check("hung", wait, deadline=30))
    asking = asyncio.create_task(health.results())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    health.close()
    (result,) = await asking
    assert result.message == "the agent is stopping"


async def test_blocking_work_hands_its_value_and_its_error_over():
    """A function in a thread is awaited like any other."""
    assert await in_thread(lambda: 7)() == 7
    with pytest.raises(ZeroDivisionError):
        await in_thread(lambda: 1 // 0)()
