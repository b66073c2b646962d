"""Events of core/v1: how often, how long, whose words, and what happens where they cannot be written."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from hibernode.kube.api import KubeApi
from hibernode.kube.events import BURST, MAX_COUNT, MAX_MESSAGE, MAX_OBJECTS, REFILL_SECONDS, EventWriter
from tests.unit.controller_kit import api_of
from tests.unit.kube_fake import EVENTS, NAME, FakeKube, Fault

START = 1_790_000_000.0


class Book:
    """A server, a writer, and the clock of both."""

    def __init__(self, fake: FakeKube, api: KubeApi) -> None:
        self.fake, self.api, self.now = fake, api, START
        self.writer = self.another("controller")

    def another(self, component: str, host: str = "") -> EventWriter:
        """Make a writer, as after a restart."""
        return EventWriter(self.api, component, host, clock=lambda: self.now, wall=lambda: self.now)

    def events(self) -> list[dict[str, Any]]:
        """List what was written, by name."""
        return [self.fake.get(EVENTS, name) for name in self.fake.names(EVENTS)]


@pytest.fixture
async def book() -> AsyncIterator[Book]:
    """Give a server without events."""
    async with FakeKube() as fake:
        api = api_of(fake)
        yield Book(fake, api)
        await api.close()


def thing(name: str = "llama", uid: str = "u", **metadata: Any) -> dict[str, Any]:
    """Make an object of a namespace."""
    whole = {"name": name, "namespace": "ns", "uid": uid, "resourceVersion": "7", **metadata}
    return {"apiVersion": "nvidia.com/v1alpha1", "kind": "DynamoCheckpoint", "metadata": whole}


async def test_an_event_names_its_object_and_who_says_it(book: Book) -> None:
    """As kubectl describe looks for it; the object's version is no part of that."""
    writer = book.another("agent", "node-a")
    await writer.say(thing(), "Warning", "Broken", "it is", field="spec.containers{main}")
    (event,) = book.events()
    assert event["involvedObject"] == {
        "apiVersion": "nvidia.com/v1alpha1",
        "kind": "DynamoCheckpoint",
        "namespace": "ns",
        "name": "llama",
        "uid": "u",
        "fieldPath": "spec.containers{main}",
    }
    assert (event["type"], event["reason"], event["message"]) == ("Warning", "Broken", "it is")
    assert event["source"] == {"component": "agent", "host": "node-a"}
    assert event["firstTimestamp"] == event["lastTimestamp"] == "2026-09-21T14:13:20Z"


async def test_the_same_words_are_one_event_with_a_count(book: Book) -> None:
    """Over restarts and other versions of the object; other words or another object are another event."""
    await book.writer.say(thing(), "Normal", "Made", "a")
    book.now += 60
    await book.another("controller").say(thing(resourceVersion="8"), "Normal", "Made", "a")
    (event,) = book.events()
    assert (event["count"], event["lastTimestamp"]) == (2, "2026-09-21T14:14:20Z")
    assert event["firstTimestamp"] == "2026-09-21T14:13:20Z"
    await book.writer.say(thing(), "Normal", "Made", "b")
    await book.writer.say(thing(), "Warning", "Made", "a")
    await book.writer.say(thing(uid="another"), "Normal", "Made", "a")
    await book.another("agent").say(thing(), "Normal", "Made", "a")
    assert [event["count"] for event in book.events()].count(1) == 4
    assert len(book.events()) == 5


async def test_a_count_that_is_none_begins_anew(book: Book) -> None:
    """Whoever may write events may write anything into one."""
    await book.writer.say(thing(), "Normal", "Made", "a")
    (event,) = book.events()
    for count in ("many", None, True, -5, MAX_COUNT):
        book.fake.put(EVENTS, {**event, "count": count})
        await book.writer.say(thing(), "Normal", "Made", "a")
        assert book.events()[0]["count"] == (MAX_COUNT if count == MAX_COUNT else 2)


async def test_one_object_cannot_fill_the_cluster(book: Book) -> None:
    """After a burst it gets one event in five minutes, and others are not held up by it."""
    for number in range(BURST + 3):
        await book.writer.say(thing(), "Normal", "Made", str(number))
    assert (len(book.events()), book.writer.dropped) == (BURST, 3)
    await book.writer.say(thing(uid="another"), "Normal", "Made", "a")
    book.now += REFILL_SECONDS
    for number in range(2):
        await book.writer.say(thing(), "Normal", "Made", f"later {number}")
    assert (len(book.events()), book.writer.dropped) == (BURST + 2, 4)
    book.now += REFILL_SECONDS * BURST * 9
    for number in range(BURST + 1):
        await book.writer.say(thing(), "Normal", "Made", f"much later {number}")
    assert book.writer.dropped == 5


def test_the_budgets_of_many_objects_are_bounded(book: Book) -> None:
    """Those that were silent for longest are forgotten."""
    for number in range(MAX_OBJECTS + 5):
        assert book.writer._budget.take(str(number))
    assert len(book.writer._budget) == MAX_OBJECTS
    assert "0" not in book.writer._budget._left


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("\x1b[31mred\x1b[0m\r\nsecond", r"\x1b[31mred\x1b[0m\r\nsecond"),
        ("\u202eevil\x00", r"\u202eevil\x00"),
        ("\ud800", r"\ud800"),
        ("x" * 5000, "x" * (MAX_MESSAGE - 3) + "..."),
        ("\x1b" * 5000, (r"\x1b" * 5000)[: MAX_MESSAGE - 3] + "..."),
        ("x" * MAX_MESSAGE, "x" * MAX_MESSAGE),
        ("", ""),
    ],
)
async def test_hostile_text_is_shown_as_escapes_and_cut(book: Book, message: str, shown: str) -> None:
    """It is printed on terminals by kubectl."""
    await book.writer.say(thing(), "Warning", "Broken", message)
    (event,) = book.events()
    assert event["message"] == shown


async def test_the_longest_name_gives_a_name(book: Book) -> None:
    """It is cut where the API server's limit is, also behind a dot."""
    for name in ("n" * 253, "n" * 235 + "." + "n" * 17, "a"):
        await book.writer.say(thing(name), "Normal", "Made", "a")
    assert len(book.events()) == 3
    assert all(NAME.fullmatch(one["metadata"]["name"]) for one in book.events())


async def test_an_object_without_a_namespace_has_its_events_in_default(book: Book) -> None:
    """As the kubelet writes those of nodes; what is no object at all is no reason to fail."""
    await book.writer.say({"kind": "Node", "metadata": {"name": "node-a"}}, "Normal", "Made", "a")
    await book.writer.say({}, "Normal", "Made", "a")
    await book.writer.say({"metadata": "junk"}, "Normal", "Made", "a")
    found = [one["involvedObject"] for (space, _, _), one in book.fake.objects.items() if space == "default"]
    assert {"kind": "Node", "name": "node-a"} in found


@pytest.mark.parametrize("code", [403, 404, 409, 422])
async def test_what_cannot_be_written_is_forgotten(book: Book, code: int) -> None:
    """An event is advice: nothing is raised, and the next one is written."""
    book.fake.fail(1, "POST .*/events", Fault(code))
    await book.writer.say(thing(), "Normal", "Made", "a")
    assert book.events() == []
    await book.writer.say(thing(), "Normal", "Made", "a")
    assert len(book.events()) == 1
