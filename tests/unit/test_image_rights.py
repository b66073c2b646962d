"""The rights of a tree as CRIU's images tell of them, whole and hostile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hibernode.criu.image_rights import CORE_MAGIC, SECCOMP_MAGIC, Rights, read_rights
from hibernode.criu.images import PSTREE_MAGIC
from hibernode.errors import IntegrityError
from tests.unit.image_kit import data, image, images, number

FIELDS = {
    "uid": 1, "gid": 2, "euid": 3, "egid": 4, "suid": 5, "sgid": 6, "fsuid": 7, "fsgid": 8, "group": 14,
    "inh": 9, "prm": 10, "eff": 11, "bnd": 12, "amb": 19, "no_new_privs": 18,
}  # fmt: skip
CAPABILITIES = ("inh", "prm", "eff", "bnd", "amb")


def creds(**changes: Any) -> bytes:
    """Encode a creds_entry of user and group 1000 without rights; lists are repeated fields."""
    usual = dict.fromkeys(("uid", "gid", "euid", "egid", "suid", "sgid", "fsuid", "fsgid"), 1000)
    found = b""
    for name, value in {**usual, **changes}.items():
        words = [value & 0xFFFFFFFF, value >> 32] if name in CAPABILITIES else value
        for word in words if isinstance(words, list) else [words]:
            found += number(FIELDS[name], word)
    return found


def core(entry: bytes | None = None, seccomp: int | None = None, last_filter: int = 0) -> bytes:
    """Encode the image of one thread, with registers that nobody looks at; of a zombie without rights."""
    thread = number(1, 7) + (b"" if seccomp is None else number(11, seccomp) + number(12, last_filter))
    messages = number(1, 1) + data(2, b"\xff" * 300) + data(3, number(1, 1))
    if entry is not None:
        messages += data(5, thread + data(10, entry))
    return image(CORE_MAGIC, messages)


def task(pid: int, ppid: int, *threads: int) -> bytes:
    """Encode a pstree entry."""
    ids = [(1, pid), (2, ppid), (3, pid), (4, pid), (5, pid), *((5, tid) for tid in threads)]
    return b"".join(number(*pair) for pair in ids)


def read(*others: bytes, root: bytes) -> Rights:
    """Read a tree of a root with one thread, and a child with the others."""
    files = {
        f"core_{pid}": content for pid, content in zip((1, 2, 5, 6), [root, root, *others], strict=False)
    }
    tasks = [task(1, 0, 2), *([task(5, 1, *([6] if len(others) > 1 else []))] if others else [])]
    with images(pstree=image(PSTREE_MAGIC, *tasks), **files) as directory:
        return read_rights(directory)


USUAL = {"uids": (1000,), "gids": (1000,), "capabilities": 0, "no_new_privs": True, "seccomp": True}
GOOD = core(creds(no_new_privs=1), 2)


@pytest.mark.parametrize(
    ("thread", "differs"),
    [
        pytest.param(GOOD, {}, id="the same"),
        pytest.param(core(), {}, id="a zombie"),
        pytest.param(core(creds(no_new_privs=1), 1), {}, id="strict seccomp"),
        pytest.param(core(creds(no_new_privs=1), 0), {"seccomp": False}, id="seccomp off"),
        pytest.param(core(creds(no_new_privs=1)), {"seccomp": False}, id="no seccomp"),
        pytest.param(core(creds(), 2), {"no_new_privs": False}, id="new privileges"),
        *(
            pytest.param(
                core(creds(no_new_privs=1, **{kind: 1 << 40 | 2}), 2), {"capabilities": 1 << 40 | 2}, id=kind
            )
            for kind in CAPABILITIES
        ),
        *(
            pytest.param(core(creds(no_new_privs=1, **{kind: 0}), 2), {"uids": (0, 1000)}, id=kind)
            for kind in ("uid", "euid", "suid", "fsuid")
        ),
        *(
            pytest.param(core(creds(no_new_privs=1, **{kind: 5}), 2), {"gids": (5, 1000)}, id=kind)
            for kind in ("gid", "egid", "sgid", "fsgid")
        ),
        pytest.param(core(creds(no_new_privs=1, group=[7, 5]), 2), {"gids": (5, 7, 1000)}, id="groups"),
    ],
)
def test_a_right_of_any_thread_is_one_of_the_tree(thread: bytes, differs: dict[str, Any]) -> None:
    """Of a child's and of a thread's, in every set and of every kind."""
    expected = Rights(**{**USUAL, **differs})
    assert read(thread, root=GOOD) == expected
    assert read(GOOD, thread, root=GOOD) == expected


def filters(*flags: int) -> bytes:
    """Encode seccomp.img with filters of these flags."""
    return image(SECCOMP_MAGIC, b"".join(data(1, data(1, b"bpf") + number(3, flag)) for flag in flags))


@pytest.mark.parametrize(
    ("leader", "flags", "filtered"),
    [
        pytest.param(core(creds(), 2, 1), (0, 1), True, id="the leader's are for all"),
        pytest.param(core(creds(), 2, 1), (1, 2), False, id="its own are others"),
        pytest.param(core(creds(), 2, 1), (0, 0), False, id="its own are not for all"),
        pytest.param(core(creds(), 2, 9), (1, 1), False, id="its own are not there"),
        pytest.param(core(creds(), 0, 1), (1, 1), False, id="it has none"),
    ],
)
def test_filters_that_all_threads_have_are_in_the_images_once(
    leader: bytes, flags: tuple[int, ...], filtered: bool
) -> None:
    """CRIU restores the leader's for all; the other threads look as if they had none."""
    tasks = image(PSTREE_MAGIC, task(1, 0, 2))
    with images(pstree=tasks, core_1=leader, core_2=core(creds()), seccomp=filters(*flags)) as directory:
        assert read_rights(directory).seccomp is filtered


@pytest.mark.parametrize("bad", [b"", GOOD, image(SECCOMP_MAGIC, number(1, 1))], ids=["empty", "other", "no"])
def test_damaged_filters_are_an_integrity_error(bad: bytes) -> None:
    """The file is named."""
    with (
        images(pstree=image(PSTREE_MAGIC, task(1, 0)), core_1=GOOD, seccomp=bad) as directory,
        pytest.raises(IntegrityError, match=r"seccomp\.img"),
    ):
        read_rights(directory)


BAD = {
    "no credentials": image(CORE_MAGIC, data(5, number(1, 7))),
    "a number for a thread": image(CORE_MAGIC, number(5, 7)),
    "a number for credentials": image(CORE_MAGIC, data(5, number(10, 7))),
    "a text for a user": image(CORE_MAGIC, data(5, data(10, data(1, b"x")))),
    "a set that is too wide": image(CORE_MAGIC, data(5, data(10, creds() + number(12, 1 << 32)))),
    "other magic": image(PSTREE_MAGIC, b""),
    "cut": GOOD[:-1],
}


@pytest.mark.parametrize("bad", BAD)
def test_a_damaged_image_is_an_integrity_error(bad: str) -> None:
    """The file is named; a thread of which nothing is known has not no rights."""
    with pytest.raises(IntegrityError, match=r"core-5\.img"):
        read(BAD[bad], root=GOOD)


def test_a_thread_without_an_image_is_an_integrity_error(tmp_path: Path) -> None:
    """A dump has one of each."""
    (tmp_path / "pstree.img").write_bytes(image(PSTREE_MAGIC, task(1, 0)))
    with pytest.raises(IntegrityError, match=r"core-1\.img is absent"):
        read_rights(tmp_path)


@given(noise=st.binary(max_size=200), cut=st.integers(0, 200))
def test_any_bytes_give_rights_or_an_integrity_error(noise: bytes, cut: int) -> None:
    """Nothing else can come of a hostile file."""
    try:
        found = read(GOOD[:cut] + noise + GOOD[cut:], root=GOOD)
    except IntegrityError:
        return
    assert 1000 in found.uids
