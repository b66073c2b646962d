"""Work that does not come back: it is left behind, named, and not begun again."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from hibernode import apart, recover
from hibernode.apart import Stuck, each, go_on, in_daemon, stuck, within
from hibernode.errors import StuckError
from hibernode.recover import Ending, Recovered
from tests.unit.artifact_kit import ID, OTHER
from tests.unit.hostile import open_descriptors

SOON = 0.5
"""Long for what does not hang, however busy the machine is."""

PATIENCE = 30.0
WHAT = "a look"


class Gate:
    """Work that comes back when it is told to."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.begun = 0

    def __call__(self) -> int:
        """Wait to be let go."""
        self.begun += 1
        self.open.wait(PATIENCE)
        return 7


def back() -> None:
    """Wait until nothing hangs any more."""
    for thread in threading.enumerate():
        if thread.name == "hibernode-apart":
            thread.join(PATIENCE)
    assert stuck() == []


@pytest.fixture
def gate() -> Iterator[Gate]:
    """Give work that hangs; no thread of it is left over."""
    made = Gate()
    yield made
    made.open.set()
    back()


def owners() -> list[str]:
    """List whose work hangs."""
    return [entry.owner for entry in stuck()]


async def test_a_job_gives_its_value_or_its_error() -> None:
    """As if it had been called; nothing is left behind."""
    assert await apart.apart(lambda: 7, "a", WHAT) == 7
    with pytest.raises(TimeoutError, match="its own"):
        await apart.apart(_fail, "a", WHAT, seconds=PATIENCE)
    assert await in_daemon(lambda: 8) == 8
    assert stuck() == []


def _fail() -> None:
    raise TimeoutError("its own")


async def test_a_job_that_hangs_is_left_behind_and_not_begun_again(gate: Gate) -> None:
    """The next one of its kind for this owner is refused at once; other kinds and owners are not."""
    with pytest.raises(StuckError, match="a: a look did not come back within"):
        await apart.apart(gate, "a", WHAT, seconds=SOON)
    (entry,) = stuck()
    assert (entry.owner, entry.what) == ("a", WHAT)
    with pytest.raises(StuckError):
        await apart.apart(gate, "a", WHAT)
    assert gate.begun == 1
    assert await apart.apart(lambda: 1, "b", WHAT) == 1
    assert await apart.apart(lambda: 2, "a", "another look") == 2
    gate.open.set()
    await asyncio.to_thread(back)
    assert await apart.apart(lambda: 3, "a", WHAT) == 3


async def test_a_cancelled_job_is_left_behind_too(gate: Gate) -> None:
    """A thread cannot be cancelled; what it was is told."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(SOON):
            await apart.apart(gate, "a", WHAT, seconds=PATIENCE)
    assert owners() == ["a"]


async def test_what_is_left_behind_stops_where_it_can(gate: Gate) -> None:
    """Who still waits for work lets it go on."""
    stopped: list[str] = []

    def changes() -> None:
        go_on()
        gate()
        try:
            go_on()
        except StuckError as error:
            stopped.append(error.message)

    with pytest.raises(StuckError):
        await apart.apart(changes, "a", WHAT, seconds=SOON)
    gate.open.set()
    await asyncio.to_thread(back)
    assert len(stopped) == 1
    go_on()  # no thread of this kind


def look_at(gate: Gate) -> dict[str, int]:
    """Look at six items of three owners; those of b hang."""
    items = ["a1", "b1", "a2", "b2", "c1", "b3"]
    return each(items, lambda item: gate() if item[0] == "b" else 1, lambda item: item[0], WHAT, seconds=SOON)


def test_looks_that_hang_cost_the_others_nothing(gate: Gate) -> None:
    """One thread is left behind for an owner, however many of its items there are and however often."""
    for _ in range(3):
        assert look_at(gate) == {"a1": 1, "a2": 1, "c1": 1}
        assert owners() == ["b"]
    assert gate.begun == 1
    gate.open.set()
    back()
    assert look_at(gate) == {"a1": 1, "a2": 1, "c1": 1, "b1": 7, "b2": 7, "b3": 7}


def test_what_comes_too_late_is_dropped(gate: Gate) -> None:
    """It may hold descriptors."""
    late: list[int] = []
    assert each(["a"], lambda _: gate(), str, WHAT, seconds=SOON, drop=late.append) == {}
    gate.open.set()
    back()
    assert late == [7]


def test_a_look_that_fails_ends_the_turn() -> None:
    """Looks do not raise; one that does is not lost."""
    with pytest.raises(TimeoutError, match="its own"):
        each(["a"], lambda _: _fail(), str, WHAT)


def test_a_single_look_may_hang_too(gate: Gate) -> None:
    """Its value, its error, or the word that it hangs."""
    assert within(lambda: 7, "a", WHAT) == 7
    with pytest.raises(TimeoutError, match="its own"):
        within(_fail, "a", WHAT)
    for _ in range(2):
        with pytest.raises(StuckError, match="a: a look"):
            within(gate, "a", WHAT, seconds=SOON)
    assert gate.begun == 1


async def test_a_deadline_counts_from_the_last_sign_of_progress() -> None:
    """However long the work takes as a whole."""
    ended = threading.Event()

    def works() -> int:
        for _ in range(8):
            ended.wait(SOON / 4)
            go_on()
        return 7

    assert await apart.apart(works, "a", WHAT, seconds=SOON) == 7
    assert within(works, "a", WHAT, seconds=SOON) == 7


def test_a_recovery_that_hangs_holds_up_no_other(gate: Gate) -> None:
    """A restarted agent comes to work, and the next one tries again."""
    done = Recovered(ID, "restore", "criu", Ending.UNDONE, "")
    hanging = recover._guarded(ID, "restore", lambda: gate() and done, SOON)  # type: ignore[return-value, arg-type]
    assert list(hanging) == []
    assert owners() == [f"the restore of {ID}"]
    assert list(recover._guarded(OTHER, "restore", lambda: done)) == [done]


async def test_no_more_than_so_many_hang(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """With more nothing new is begun, but for what is the agent's own."""
    monkeypatch.setattr(apart, "MAX_STUCK", 2)
    for owner in ("a", "b"):
        with pytest.raises(StuckError):
            await apart.apart(gate, owner, WHAT, seconds=SOON)
    with pytest.raises(StuckError, match="2 looks hang"):
        await apart.apart(lambda: 1, "c", WHAT)
    with pytest.raises(StuckError, match="2 looks hang"):
        each(["c"], len, str, WHAT)
    assert await in_daemon(lambda: 1) == 1


async def test_nothing_of_it_stays(gate: Gate) -> None:
    """Neither a thread nor a descriptor, when all has come back."""
    before, threads = open_descriptors(), threading.active_count()
    with pytest.raises(StuckError):
        await apart.apart(gate, "a", WHAT, seconds=SOON)
    assert isinstance(stuck()[0], Stuck)
    gate.open.set()
    await asyncio.to_thread(back)
    assert open_descriptors() == before
    assert threading.active_count() <= threads + 1  # the executor's that waited
