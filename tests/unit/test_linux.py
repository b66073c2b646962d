"""Raw system calls: what they return, and what their errors say."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hibernode.host import linux

BENEATH = linux.RESOLVE_BENEATH
NO_LINKS = BENEATH | linux.RESOLVE_NO_SYMLINKS


def run_script(code: str, *args: str) -> str:
    """Run ``code`` in a Python of its own and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def place(tmp_path):
    """Make a directory ``top`` with files and links, beside a ``secret`` that lies outside of it."""
    (tmp_path / "secret").write_text("secret")
    top = tmp_path / "top"
    (top / "inner").mkdir(parents=True)
    (top / "file").write_text("file")
    (top / "inner" / "file").write_text("inner file")
    (top / "out").symlink_to("../secret")
    (top / "absolute").symlink_to("/file")
    (top / "inside").symlink_to("inner/file")
    (top / "through").symlink_to("inner")
    fd = os.open(top, os.O_PATH)
    yield top, fd
    os.close(fd)


@pytest.mark.parametrize(
    ("path", "resolve", "expected"),
    [
        pytest.param("file", NO_LINKS, "file", id="a plain name opens"),
        pytest.param("inner/file", NO_LINKS, "inner file", id="a path of plain names opens"),
        pytest.param(b"file", NO_LINKS, "file", id="bytes are a path too"),
        pytest.param(
            "inside", BENEATH, "inner file", id="a link that stays inside opens when links are allowed"
        ),
        pytest.param("inner/../file", BENEATH, "file", id="dot-dot inside is fine for the kernel"),
        pytest.param(
            "absolute", linux.RESOLVE_IN_ROOT, "file", id="an absolute link starts at the root given"
        ),
        pytest.param("../../file", linux.RESOLVE_IN_ROOT, "file", id="dot-dot stops at the root given"),
        pytest.param("inside", NO_LINKS, errno.ELOOP, id="a last link is refused"),
        pytest.param("through/file", NO_LINKS, errno.ELOOP, id="a link in the middle is refused"),
        pytest.param("out", BENEATH, errno.EXDEV, id="a link to the outside is refused"),
        pytest.param("absolute", BENEATH, errno.EXDEV, id="an absolute link is refused"),
        pytest.param("../secret", BENEATH, errno.EXDEV, id="dot-dot to the outside is refused"),
        pytest.param("/etc/passwd", BENEATH, errno.EXDEV, id="an absolute path is refused"),
        pytest.param("absent", NO_LINKS, errno.ENOENT, id="an absent file is absent"),
        pytest.param("file/x", NO_LINKS, errno.ENOTDIR, id="a file is no directory"),
        pytest.param("x" * 300, NO_LINKS, errno.ENAMETOOLONG, id="a name of 300 letters is too long"),
    ],
)
def test_openat2_resolves_by_the_rules(place, path, resolve, expected):
    """A path opens only if every step of it is allowed."""
    _, dir_fd = place
    if isinstance(expected, int):
        with pytest.raises(OSError) as caught:
            linux.openat2(dir_fd, path, os.O_RDONLY, resolve=resolve)
        assert caught.value.errno == expected
        assert caught.value.filename == path
        return
    with os.fdopen(linux.openat2(dir_fd, path, os.O_RDONLY, resolve=resolve)) as file:
        assert file.read() == expected


def test_openat2_refuses_the_magic_links_of_proc():
    """/proc/self/fd leads anywhere, so RESOLVE_NO_MAGICLINKS stops there."""
    proc = os.open("/proc", os.O_PATH)
    try:
        with pytest.raises(OSError) as caught:
            linux.openat2(proc, "self/root/etc", os.O_PATH, resolve=linux.RESOLVE_NO_MAGICLINKS)
        assert caught.value.errno == errno.ELOOP
    finally:
        os.close(proc)


@pytest.mark.parametrize("path", ["file\0", "file\0/x", b"\0"])
def test_a_nul_in_a_path_is_refused_and_not_cut_off(place, path):
    """By ctypes alone the part before the NUL would be opened, which is another file."""
    _, dir_fd = place
    with pytest.raises(ValueError, match="null byte"):
        linux.openat2(dir_fd, path, os.O_RDONLY, resolve=NO_LINKS)
    with pytest.raises(ValueError, match="null byte"):
        linux.renameat2(dir_fd, path, dir_fd, "new", 0)
    with pytest.raises(ValueError, match="null byte"):
        linux.renameat2(dir_fd, "file", dir_fd, path, 0)


def test_openat2_makes_close_on_exec_descriptors_with_the_mode_asked_for(place):
    """A created file has the mode given, and no child inherits the descriptor."""
    top, dir_fd = place
    fd = linux.openat2(dir_fd, "new", os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode=0o600, resolve=NO_LINKS)
    try:
        assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    finally:
        os.close(fd)
    assert (top / "new").stat().st_mode & 0o777 == 0o600


RENAMER = """
import os, sys
os.chdir(sys.argv[1])
print("ready", flush=True)
while True:
    os.rename("file", "other")
    os.rename("other", "file")
"""


def test_openat2_outlasts_renames_elsewhere(place):
    """The kernel says EAGAIN for a dot-dot that races with any rename; the caller never sees it."""
    top, dir_fd = place
    path = "inner/../" * 8 + "file"
    with subprocess.Popen([sys.executable, "-c", RENAMER, top / "inner"], stdout=subprocess.PIPE) as renamer:
        try:
            assert renamer.stdout is not None
            assert renamer.stdout.readline() == b"ready\n"
            for _ in range(5000):
                os.close(linux.openat2(dir_fd, path, os.O_PATH, resolve=BENEATH))
            assert renamer.poll() is None
        finally:
            renamer.kill()


FILTERED = """
import ctypes, os, struct, sys
from hibernode.host import linux
linux.set_no_new_privs()
# BPF: load the call's number; openat2 (437) answers with the errno given, all else is allowed.
answer = 0x00050000 | int(sys.argv[1])
rules = [(0x20, 0, 0, 0), (0x15, 0, 1, 437), (0x06, 0, 0, answer), (0x06, 0, 0, 0x7FFF0000)]
code = b"".join(struct.pack("HBBI", *rule) for rule in rules)
buffer = ctypes.create_string_buffer(code)
class Program(ctypes.Structure):
    _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
program = Program(len(rules), ctypes.addressof(buffer))
assert ctypes.CDLL(None).prctl(22, 2, ctypes.byref(program)) == 0
try:
    linux.openat2(os.open("/", os.O_PATH), "etc", os.O_PATH, resolve=linux.RESOLVE_BENEATH)
except OSError as error:
    print(error.errno, error.strerror)
"""


@pytest.mark.parametrize(
    ("number", "sentence"),
    [
        pytest.param(errno.ENOSYS, "older than 5.6 or a seccomp filter hides it", id="hidden"),
        pytest.param(errno.EPERM, "a capability is missing or a seccomp filter forbids it", id="forbidden"),
    ],
)
def test_a_call_behind_a_seccomp_filter_says_so(number, sentence):
    """An old container profile answers openat2 with ENOSYS or EPERM: the error names the filter."""
    shown = run_script(FILTERED, str(number))
    assert shown.startswith(f"{number} openat2 is not ")
    assert shown.endswith(sentence)


def test_renameat2_refuses_to_replace_and_exchanges(place):
    """NOREPLACE leaves both alone, EXCHANGE swaps, 0 replaces; a link is moved, not followed."""
    top, dir_fd = place
    with pytest.raises(FileExistsError) as caught:
        linux.renameat2(dir_fd, "file", dir_fd, "inside", linux.RENAME_NOREPLACE)
    assert (caught.value.filename, caught.value.filename2) == ("file", "inside")
    linux.renameat2(dir_fd, "file", dir_fd, "out", linux.RENAME_EXCHANGE)
    assert (top / "file").is_symlink()
    assert (top / "out").read_text() == "file"
    linux.renameat2(dir_fd, "out", dir_fd, "file", 0)
    assert (top / "file").read_text() == "file"
    assert (top.parent / "secret").read_text() == "secret"
    with pytest.raises(FileNotFoundError):
        linux.renameat2(dir_fd, "absent", dir_fd, "new", linux.RENAME_NOREPLACE)


@pytest.mark.parametrize(
    ("path", "magic"),
    [
        pytest.param("/proc", linux.PROC_SUPER_MAGIC, id="proc"),
        pytest.param("/dev/shm", linux.TMPFS_MAGIC, id="tmpfs"),
    ],
)
def test_filesystem_type_is_the_same_by_path_and_by_descriptor(path, magic):
    """Both forms give the number of linux/magic.h."""
    fd = os.open(path, os.O_PATH)
    try:
        assert linux.filesystem_type(path) == linux.filesystem_type(Path(path)) == magic
        assert linux.filesystem_type(fd) == magic
    finally:
        os.close(fd)
    with pytest.raises(FileNotFoundError):
        linux.filesystem_type(path + "/absent")
    with pytest.raises(OSError, match="Bad file descriptor"):
        linux.filesystem_type(-1)


@pytest.mark.parametrize("path", ["/dev/null", "/etc/passwd", "/", "/proc/self/fd/0"])
def test_stat_cached_agrees_with_stat(path):
    """On a local file system the cached stat is the stat."""
    cached, plain = linux.stat_cached(path), Path(path).stat()
    assert (cached.mode, cached.dev, cached.ino) == (plain.st_mode, plain.st_dev, plain.st_ino)
    assert (cached.rdev, cached.nlink, cached.size) == (plain.st_rdev, plain.st_nlink, plain.st_size)


def test_stat_cached_of_an_absent_path_is_an_error():
    """The error names the path."""
    with pytest.raises(FileNotFoundError, match="/absent"):
        linux.stat_cached("/absent")


CAPABILITIES = """
import os, sys
from hibernode.host import linux, procfs
user, mask = int(sys.argv[1]), int(sys.argv[2])
os.setresuid(user, user, user)
linux.set_capabilities(mask)
status = procfs.read_status(os.getpid())
print(status.cap_eff, status.cap_prm, status.cap_inh, status.cap_amb)
"""


@pytest.mark.parametrize(
    ("user", "mask", "kept"),
    [(0, 0, 0), (0, 1 << 1 | 1 << 34, 1 << 1 | 1 << 34), (0, 1 << 62, 0), (65534, (1 << 62) - 1, 0)],
    ids=["none", "two of them", "one that there is not", "of a user that has none"],
)
def test_capabilities_are_only_taken_away(user, mask, kept):
    """What is asked for and was there stays, in both halves; nothing is gained, nothing is handed on."""
    done = subprocess.run(
        [sys.executable, "-c", CAPABILITIES, str(user), str(mask)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.split() == [str(kept), str(kept), "0", "0"]


def test_an_undumpable_process_hides_its_links():
    """Another process of the same user without capabilities may not follow them."""
    code = (
        "import os, sys; from hibernode.host import linux\n"
        "parent = os.getpid()\n"
        "linux.set_capabilities(0)\n"
        "if sys.argv[1] == 'hide': linux.set_undumpable()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    linux._prctl('', linux.PR_SET_DUMPABLE, 1)\n"
        "    try: os.readlink(f'/proc/{parent}/root'); os._exit(0)\n"
        "    except PermissionError: os._exit(1)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    )
    for word, code_ in (("show", 0), ("hide", 1)):
        assert subprocess.run([sys.executable, "-c", code, word], check=False, timeout=60).returncode == code_


def test_no_new_privs_shows_in_the_status():
    """The bit is set in the process that asked."""
    code = (
        "from hibernode.host import linux; linux.set_no_new_privs(); print(open('/proc/self/status').read())"
    )
    assert "NoNewPrivs:\t1" in run_script(code)


SETNS = """
import ctypes, os, signal
from hibernode.host import linux
read, write = os.pipe()
child = os.fork()
if child == 0:
    assert ctypes.CDLL(None).unshare(linux.CLONE_NEWUTS) == 0
    os.write(write, b"x")
    signal.pause()
os.read(read, 1)
theirs = os.readlink(f"/proc/{child}/ns/uts")
before = os.readlink("/proc/self/ns/uts")
fd = os.open(f"/proc/{child}/ns/uts", os.O_RDONLY)
linux.setns(fd, linux.CLONE_NEWUTS)
print(before != theirs, os.readlink("/proc/thread-self/ns/uts") == theirs)
os.kill(child, 9)
os.waitpid(child, 0)
try:
    linux.setns(fd, linux.CLONE_NEWNET)
except OSError as error:
    print(error.strerror)
"""


def test_setns_moves_into_a_namespace():
    """The thread is then in the other namespace; a wrong kind is an error."""
    assert run_script(SETNS).splitlines() == ["True True", "Invalid argument"]


@pytest.mark.parametrize("pid", [0, -1, -(1 << 31), 1 << 31, (1 << 32) + 1, 1 << 64])
def test_a_number_that_is_no_pid_finds_no_process(pid):
    """A number from a hostile file is not cut to 32 bits, where it could name another process."""
    with pytest.raises(ProcessLookupError):
        linux.pidfd_open(pid)


def test_a_pidfd_signals_its_process_and_no_other():
    """Signals arrive; once the process is reaped there is nobody to signal."""
    child = subprocess.Popen(["sleep", "600"])
    fd = linux.pidfd_open(child.pid)
    try:
        assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        linux.pidfd_send_signal(fd, 0)
        linux.pidfd_send_signal(fd, signal.SIGTERM)
        assert child.wait(60) == -signal.SIGTERM
        with pytest.raises(ProcessLookupError):
            linux.pidfd_send_signal(fd, 0)
    finally:
        os.close(fd)
