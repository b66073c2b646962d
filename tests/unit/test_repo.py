"""The repository itself: what may not be in it, and what must agree with what."""

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TEST_MARKERS_OF_PLUGINS = {
    "asyncio",
    "filterwarnings",
    "parametrize",
    "skip",
    "skipif",
    "timeout",
    "usefixtures",
    "xfail",
}
# Put together here, so that this file does not hold what it looks for.
REGISTRY_HOSTS = [
    ".".join(parts)
    for parts in (
        ("pypi", "org"),
        ("pythonhosted", "org"),
        ("npmjs", "org"),
        ("deb", "debian", "org"),
        ("ftp", "debian", "org"),
        ("security", "debian", "org"),
        ("snapshot", "debian", "org"),
    )
]
SESSION_PATHS = ["/" + path for path in ("work/main", "work/shared", "work/.", "root/.", "tmp/SPEC")]


def repository_files() -> list[Path]:
    """List the files that are, or would be, committed."""
    if not (ROOT / ".git").exists():  # an unpacked archive: all of it but what make made
        made = {".venv", "__pycache__", *(path.name for path in ROOT.glob(".*_cache"))}
        return [path for path in ROOT.rglob("*") if path.is_file() and not made & set(path.parts)]
    listed = subprocess.run(
        [
            "git",
            "-c",
            f"safe.directory={ROOT}",
            "ls-files",
            "-z",
            "--cached",
            "--others",
            "--exclude-standard",
        ],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout
    paths = (ROOT / os.fsdecode(name) for name in listed.split(b"\0") if name)
    return [path for path in paths if path.is_file()]


def code_files() -> list[Path]:
    """List the Python files."""
    return [
        path for folder in ("agent", "tests", "scripts") for path in sorted((ROOT / folder).rglob("*.py"))
    ]


def names(folder: Path) -> list[str]:
    """List what is in a folder."""
    return [path.name for path in folder.iterdir()]


def lock_pins() -> dict[str, str]:
    """Read the lock file: name to version."""
    text = (ROOT / "requirements.lock").read_text()
    return {
        canonicalize_name(name): version
        for name, version in re.findall(r"(?m)^([A-Za-z0-9._-]+)==([^ ;]+)", text)
    }


@pytest.mark.parametrize("needle", REGISTRY_HOSTS + SESSION_PATHS)
def test_no_file_names_a_registry_or_a_folder_of_one_machine(needle):
    """Addresses come from the machine's configuration, and paths from where the checkout is."""
    assert [path for path in repository_files() if needle.encode() in path.read_bytes()] == []


def test_the_lock_file_holds_no_address_and_no_path():
    """The lock file is names, versions, conditions and hashes, so that it fits every machine."""
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    form = re.compile(r"#.*|[a-z0-9-]+==\S+( ; .*)? \\|    --hash=sha256:[0-9a-f]{64}( \\)?|    # .*")
    assert [line for line in lines if not form.fullmatch(line)] == []
    assert [line for line in lines if "://" in line or " /" in line] == []


def test_the_lock_file_pins_all_that_the_project_asks_for():
    """Dependencies, tools and build backend are pinned to versions that pyproject.toml accepts."""
    project = PROJECT["project"]
    wanted = [*project["dependencies"], *PROJECT["build-system"]["requires"]]
    wanted += [item for extra in project["optional-dependencies"].values() for item in extra]
    pins = lock_pins()
    bad = [
        f"{requirement}: {pins.get(canonicalize_name(requirement.name))}"
        for requirement in map(Requirement, wanted)
        if pins.get(canonicalize_name(requirement.name), "") not in requirement.specifier
    ]
    assert bad == [], "run make lock"


def test_pins_can_be_made_when_set_up_would_refuse():
    """A new dependency is in pyproject.toml before it is pinned, and set-up takes only what is pinned."""
    (needs,) = re.findall(r"(?m)^lock:(.*?)##", (ROOT / "Makefile").read_text())
    assert needs.split() == []


def test_every_pin_has_a_hash():
    """Nothing is installed without a hash, so each pin must bring one."""
    text = (ROOT / "requirements.lock").read_text()
    entries = re.split(r"(?m)^(?=[a-z0-9-]+==)", text)[1:]
    assert len(entries) == len(lock_pins())
    assert [entry.split()[0] for entry in entries if "--hash=sha256:" not in entry] == []


def test_the_packaged_profile_is_the_one_in_seccomp():
    """The two copies of the profile are the same file, byte for byte."""
    packaged = ROOT / "agent" / "hibernode" / "data" / "block-iouring.json"
    assert packaged.read_bytes() == (ROOT / "seccomp" / "block-iouring.json").read_bytes()


def test_make_help_lists_every_target():
    """Each target has a line in make help, and help is what make alone prints."""
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"(?m)^([a-z][a-z0-9-]*):", makefile)
    (phony,) = re.findall(r"(?m)^\.PHONY: (.*)", makefile)
    assert sorted(phony.split()) == sorted(targets)
    printed = subprocess.run(
        ["make", "--no-print-directory"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert [line.split()[0] for line in printed.splitlines()] == targets


def test_every_marker_is_declared():
    """A test's marker is one of pyproject.toml or of a plugin, else choosing by it would choose nothing."""
    declared = {line.split(":")[0] for line in PROJECT["tool"]["pytest"]["ini_options"]["markers"]}
    used = {name for path in code_files() for name in re.findall(r"\bpytest\.mark\.(\w+)", path.read_text())}
    assert used <= declared | TEST_MARKERS_OF_PLUGINS


def test_no_module_is_longer_than_500_lines():
    """A module over 500 lines is two."""
    modules = (ROOT / "agent").rglob("*.py")
    assert {str(path): count for path in modules if (count := len(path.read_text().splitlines())) > 500} == {}


@pytest.mark.parametrize(
    "script",
    [
        ".ci/run",
        *(f"scripts/{path.name}" for path in sorted((ROOT / "scripts").glob("*.sh"))),
    ],
)
def test_shell_scripts_can_be_run(script):
    """Each script is executable, stops at the first error, and is bash that parses."""
    path = ROOT / script
    assert os.access(path, os.X_OK)
    assert "set -euo pipefail" in path.read_text()
    subprocess.run(["bash", "-n", path], check=True)


# Stands for Python: makes a .venv of itself, and its pip fails while there is a file named "broken".
PYTHON = """#!/bin/sh
case "$*" in
  *'-m venv'*)
    mkdir -p .venv/bin && cp "$0" .venv/bin/python
    echo "#!$PWD/.venv/bin/python" >.venv/bin/pip ;;
  *' install '*) test ! -e broken || { echo 'pip says why'; exit 1; } ;;
esac
"""


@pytest.fixture
def checkout(tmp_path):
    """Make a checkout with what setup.sh reads, and beside it a Python and a CRIU that only pretend."""
    root = tmp_path / "a checkout"
    (root / "scripts").mkdir(parents=True)
    (root / "agent/hibernode/data").mkdir(parents=True)
    scripts = [
        f"scripts/{name}"
        for name in ("setup.sh", "lib.sh", "install-criu.sh", "build-placeholder.sh", "container-tools.sh")
    ]
    read = (
        "scripts/modelexpress.lock",
        "agent/hibernode/data/placeholder.c",
        "requirements.lock",
        "pyproject.toml",
    )
    for name in (*scripts, *read):
        shutil.copy2(ROOT / name, root / name)
    (tmp_path / "bin").mkdir()
    for name, text in (("python3.99", PYTHON), ("criu", "#!/bin/sh\necho 'Version: 4.2'\n")):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    return root


def set_up(checkout: Path) -> subprocess.CompletedProcess[str]:
    """Run setup.sh there."""
    path = f"{checkout.parent / 'bin'}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", checkout / "scripts" / "setup.sh"],
        capture_output=True,
        text=True,
        env={"PATH": path, "HIBERNODE_PYTHON": "python3.99"},
        check=False,
    )


def test_set_up_that_is_done_does_nothing(checkout):
    """The first run does its steps, the second prints and writes nothing, a new lock file starts again."""
    first = set_up(checkout)
    assert first.returncode == 0, first.stderr
    assert f"CRIU is {checkout.parent}/bin/criu\n" in first.stdout
    before = {path: path.stat().st_mtime_ns for path in checkout.rglob("*")}
    second = set_up(checkout)
    assert (second.returncode, second.stdout, second.stderr) == (0, "", "")
    assert {path: path.stat().st_mtime_ns for path in checkout.rglob("*")} == before
    (checkout / "requirements.lock").write_text("# other\n")
    again = set_up(checkout).stdout
    assert "requirements.lock" in again
    assert "virtual environment" not in again


def test_set_up_that_fails_says_why_and_is_not_done(checkout):
    """What a failed step printed is shown, and the next run tries it again."""
    (checkout / "broken").touch()
    failed = set_up(checkout)
    assert failed.returncode == 1
    assert "pip says why" in failed.stderr
    (checkout / "broken").unlink()
    assert "setup: done" in set_up(checkout).stdout


def test_set_up_is_done_again_after_a_move(checkout):
    """A .venv holds absolute paths, so a checkout that was moved is not taken for ready."""
    set_up(checkout)
    moved = checkout.rename(checkout.parent / "moved")
    assert "virtual environment" in set_up(moved).stdout


def test_a_present_criu_is_used_and_nothing_is_written(tmp_path):
    """Where a CRIU that is new enough is on PATH, its path is all that comes out."""
    present = tmp_path / "bin" / "criu"
    present.parent.mkdir()
    present.write_text("#!/bin/sh\necho 'Version: 4.10'\n")
    present.chmod(0o755)
    result = subprocess.run(
        ["bash", ROOT / "scripts" / "install-criu.sh", tmp_path / "prefix"],
        capture_output=True,
        text=True,
        env={"PATH": f"{present.parent}:{os.environ['PATH']}"},
        check=True,
    )
    assert (result.stdout, result.stderr) == (f"{present}\n", "")
    assert names(tmp_path) == ["bin"]


@pytest.mark.parametrize("version", ["4.1.1", "3.17.1", "4", "", "unknown"])
def test_an_old_criu_is_not_used(tmp_path, version):
    """A CRIU below 4.2 does not count, whichever way its version compares as text."""
    present = tmp_path / "bin" / "criu"
    present.parent.mkdir()
    present.write_text(f"#!/bin/sh\necho 'Version: {version}'\n")
    present.chmod(0o755)
    # Without apt on PATH the script has nothing else to try.
    for tool in ("bash", "sed", "sort", "head", "realpath", "id", "ls", "dirname"):
        (tmp_path / "bin" / tool).symlink_to(
            f"/usr/bin/{tool}" if Path(f"/usr/bin/{tool}").exists() else f"/bin/{tool}"
        )
    result = subprocess.run(
        ["bash", ROOT / "scripts" / "install-criu.sh", tmp_path / "prefix"],
        capture_output=True,
        text=True,
        env={"PATH": str(present.parent)},
        check=False,
    )
    assert (result.returncode, result.stdout) == (1, "")
    assert "no CRIU >= 4.2" in result.stderr
    assert names(tmp_path) == ["bin"]


def test_a_folder_of_somebody_else_is_not_replaced(tmp_path):
    """A PREFIX that holds something else is refused, whatever it is."""
    (tmp_path / "precious").write_text("x")
    result = subprocess.run(
        ["bash", ROOT / "scripts" / "install-criu.sh", tmp_path],
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"], "HIBERNODE_CRIU_BUILD": "1"},
        check=False,
    )
    assert (result.returncode, names(tmp_path)) == (1, ["precious"])
    assert "not empty" in result.stderr


def test_the_control_plane_is_not_built_where_the_disk_is_too_small(tmp_path):
    """The refusal comes before the work, says how much is missing and what to do, and leaves nothing."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "df").write_text("#!/bin/sh\necho Avail\necho 1048576\n")
    (tmp_path / "bin" / "df").chmod(0o755)
    shutil.copytree(ROOT / "scripts", tmp_path / "checkout" / "scripts")
    result = subprocess.run(
        ["bash", tmp_path / "checkout" / "scripts" / "cluster-tools.sh"],
        capture_output=True,
        text=True,
        env={"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "XDG_CACHE_HOME": str(tmp_path / "cache")},
        check=False,
    )
    assert (result.returncode, result.stdout) == (1, "")
    assert "has 1024 MiB free, the build needs 4096 MiB" in result.stderr
    assert names(tmp_path / "cache" / "hibernode") == []
    assert names(tmp_path / "checkout") == ["scripts"]
