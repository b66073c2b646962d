"""Settings: which source wins, what each key takes, and what a file that is no settings file gets."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from hibernode.config import ENV_PREFIX, ERA_ENV, KEYS, Loaded, env_name, load
from hibernode.config_file import MAX_BYTES
from hibernode.errors import UsageError
from hibernode.settings import parse_seconds, parse_size

GIB = 1 << 30


def write(directory: Path, content: str | bytes) -> Path:
    path = directory / "config.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def only(directory: Path, content: str | bytes) -> Loaded:
    """Load a file and nothing else."""
    return load(file=write(directory, content), environ={})


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    """Write a settings file that says nothing, so that the machine's own is not read."""
    return write(tmp_path, "# nothing\n")


def refused(**sources: object) -> UsageError:
    with pytest.raises(UsageError) as caught:
        load(**sources)  # type: ignore[arg-type]  # a table's sources
    assert caught.value.exit_code == 2
    assert caught.value.remedy
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 600
    return caught.value


# values -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("512", 512),
        ("512B", 512),
        ("1k", 1000),
        ("1K", 1000),
        ("1KiB", 1024),
        ("512MiB", 512 << 20),
        ("512 MiB", 512 << 20),
        ("1.5GiB", 3 * GIB // 2),
        ("10GB", 10**10),
        ("10G", 10**10),
        ("10Gi", 10 * GIB),
        ("2TiB", 2 << 40),
        (" 7MB ", 7_000_000),
        ("9007199254740993", 9007199254740993),
        (12, 12),
    ],
)
def test_sizes_are_exact(text, size):
    """With i a unit is a power of 1024, without it of 1000; no float rounds a large number."""
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    ["", "big", "-1", "1 XB", "5iB", "1e9", "nan", "1,5GB", "１", "1MiBs", "1  MiB", "9" * 400, "0x10", True],
)
def test_what_is_no_size_is_refused(text):
    """A ValueError, which names the key by the time a person sees it; never another exception."""
    with pytest.raises(ValueError, match=r"size|number"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0.0),
        ("250ms", 0.25),
        ("90", 90.0),
        ("90s", 90.0),
        ("1.5m", 90.0),
        ("15 m", 900.0),
        ("6h", 21600.0),
        ("7d", 604800.0),
        (3, 3),
    ],
)
def test_durations_are_seconds(text, seconds):
    """A number alone is seconds."""
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "-1s", "1w", "1h30m", "inf", "nan", "٣s", "9" * 400, False])
def test_what_is_no_duration_is_refused(text):
    """As for sizes."""
    with pytest.raises(ValueError, match=r"duration|number"):
        parse_seconds(text)


# sources ----------------------------------------------------------------------------------------------


def test_later_sources_win(tmp_path, empty):
    """Default, file, the eras' names, HIBERNODE_*, flags: each beats those before it and is named."""
    file = tmp_path / "file.yaml"
    file.write_text("node_name: file\ncheckpoint: {attempts: 4}\n")
    era = {"NODE_NAME": "era"}
    own = {"HIBERNODE_NODE_NAME": "own"}
    flag = [("node_name", "first"), ("node_name", "flag")]
    cases = [
        (load(file=empty, environ={}), "", "default"),
        (load(file=file, environ={}), "file", f"file {file}"),
        (load(file=file, environ=era), "era", "env NODE_NAME"),
        (load(file=file, environ={**own, **era}), "own", "env HIBERNODE_NODE_NAME"),
        (load(file=file, environ={**own, **era}, flags=flag), "flag", "flag"),
    ]
    for loaded, value, source in cases:
        assert loaded.settings.node_name == value
        assert {option.key: option.source for option in loaded.options()}["node_name"] == source
    assert cases[-1][0].settings.checkpoint.attempts == 4


def test_every_key_has_a_default_a_variable_and_a_description(empty):
    """What config show prints is complete, and each default is a value that its key takes as text."""
    loaded = load(file=empty, environ={})
    options = list(loaded.options())
    assert tuple(option.key for option in options) == KEYS
    assert all(option.description and option.source == "default" for option in options)
    assert len({option.env for option in options}) == len(KEYS)
    again = load(file=empty, environ={option.env: str(option.value) for option in options})
    assert again.settings == loaded.settings
    assert set(again.sources) == set(KEYS)


def test_the_file_can_be_named_in_the_environment(tmp_path):
    """HIBERNODE_CONFIG names the file; --config beats it."""
    file = write(tmp_path, "node_name: env\n")
    other = tmp_path / "other.yaml"
    other.write_text("node_name: flag\n")
    environ = {"HIBERNODE_CONFIG": str(file)}
    assert load(environ=environ).settings.node_name == "env"
    assert load(file=other, environ=environ).settings.node_name == "flag"


def test_a_config_map_is_read_through_its_links(tmp_path):
    """Kubernetes mounts a ConfigMap's files as links."""
    (tmp_path / "..data").mkdir()
    write(tmp_path / "..data", "node_name: linked\n")
    link = tmp_path / "link.yaml"
    link.symlink_to("..data/config.yaml")
    assert load(file=link, environ={}).settings.node_name == "linked"


@pytest.mark.parametrize(
    ("name", "value", "key", "taken"),
    [
        ("NODE_NAME", "node-7", "node_name", "node-7"),
        ("RESTRICTED_NAMESPACE", "workers", "kubernetes.namespace", "workers"),
        ("CHECKPOINT_DIR", "/era", "store.path", Path("/era")),
        ("CRIU_GHOST_LIMIT", "1GiB", "criu.ghost_limit_bytes", GIB),
        ("CRIU_TIMEOUT", "21600", "checkpoint.deadline_seconds", 21600.0),
        ("SNAPSHOT_LOG_LEVEL", "WARN", "log.level", "warning"),
    ],
)
def test_the_eras_names_are_taken(empty, name, value, key, taken):
    """A chart's own variable sets the key, and an empty one sets nothing."""
    loaded = load(file=empty, environ={name: value})
    option = {option.key: option for option in loaded.options()}[key]
    assert (option.value, option.source) == (taken, f"env {name}")
    assert load(file=empty, environ={name: ""}).sources == {}


def test_the_table_of_era_names_is_tested_whole():
    """A name that is added to the table must come into the test above."""
    assert set(ERA_ENV) == {
        "NODE_NAME",
        "RESTRICTED_NAMESPACE",
        "CHECKPOINT_DIR",
        "CRIU_GHOST_LIMIT",
        "CRIU_TIMEOUT",
        "SNAPSHOT_LOG_LEVEL",
    }


@pytest.mark.parametrize(
    "name",
    [
        "HIBERNODE_SERVICE_HOST",
        "HIBERNODE_SERVICE_PORT",
        "HIBERNODE_SERVICE_PORT_METRICS",
        "HIBERNODE_PORT",
        "HIBERNODE_METRICS_PORT_9465_TCP",
        "HIBERNODE_METRICS_PORT_9465_TCP_ADDR",
        "HIBERNODE_METRICS_SERVICE_HOST",
    ],
)
def test_a_service_of_that_name_stops_no_agent(empty, name):
    """Kubernetes puts such variables into every pod beside a Service; they are no settings of ours."""
    assert load(file=empty, environ={name: "tcp://10.0.0.1:9465"}).sources == {}


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        pytest.param("", (), id="nothing"),
        pytest.param(" , ,", (), id="commas alone"),
        pytest.param("/var/cache/**", ("/var/cache/**",), id="one"),
        pytest.param(
            "/var/cache/**, __pycache__ ,/a b", ("/var/cache/**", "__pycache__", "/a b"), id="several"
        ),
    ],
)
def test_a_list_is_written_with_commas(tmp_path, empty, text, taken):
    """In the environment, in a flag and in the file alike; shown in the form that is taken again."""
    key, name = "checkpoint.rootfs_exclude", "HIBERNODE_CHECKPOINT_ROOTFS_EXCLUDE"
    file = tmp_path / "list.yaml"
    file.write_text(f"checkpoint: {{rootfs_exclude: '{text}'}}\n")
    for loaded in (
        load(file=file, environ={}),
        load(file=empty, environ={name: text}),
        load(file=empty, environ={}, flags=[(key, text)]),
    ):
        assert loaded.settings.checkpoint.rootfs_exclude == taken
        (shown,) = [option for option in loaded.options() if option.key == key]
        assert shown.value == ", ".join(taken)
        again = load(file=empty, environ={shown.env: str(shown.value)})
        assert again.settings == loaded.settings


def test_a_list_may_be_one_in_the_file(tmp_path):
    """With an entry a line, where also a comma is a part of it; the last source replaces the whole list."""
    file = write(tmp_path, "checkpoint:\n  rootfs_exclude:\n    - /var/cache/**\n    - '/a,b'\n")
    loaded = load(file=file, environ={})
    assert loaded.settings.checkpoint.rootfs_exclude == ("/var/cache/**", "/a,b")
    loaded = load(file=file, environ={"HIBERNODE_CHECKPOINT_ROOTFS_EXCLUDE": "/x"})
    assert loaded.settings.checkpoint.rootfs_exclude == ("/x",)
    assert only(tmp_path, "checkpoint: {rootfs_exclude: []}").settings.checkpoint.rootfs_exclude == ()


# what is refused --------------------------------------------------------------------------------------


def test_an_unknown_key_is_an_error_that_names_where_it_stands(tmp_path, empty):
    """In the file, in the environment, in a flag: each with the nearest key that exists."""
    file = tmp_path / "file.yaml"
    file.write_text("store: {pth: /x}\n")
    error = refused(file=file, environ={})
    assert error.message == f"file {file}: store.pth is not a setting"
    assert "store.path" in error.remedy
    error = refused(file=empty, environ={"HIBERNODE_STOR_PATH": "/x"})
    assert error.message == "environment: HIBERNODE_STOR_PATH is not a setting"
    assert "HIBERNODE_STORE_PATH" in error.remedy
    error = refused(file=empty, environ={}, flags=[("stor.path", "/x")])
    assert error.message == "flag: stor.path is not a setting"
    assert "store.path" in error.remedy
    assert "config show" in error.remedy


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("store.path", "relative"),
        ("store.path", ""),
        ("store.min_free_bytes", "much"),
        ("store.min_free_bytes", "-1"),
        ("store.min_free_bytes", "99999999TiB"),
        ("store.workers", "65"),
        ("signals.watch", "sometimes"),
        ("signals.rescan_seconds", "0"),
        ("signals.max_file_bytes", "1"),
        ("criu.binary", "criu"),
        ("criu.log_level", "5"),
        ("criu.file_locks", "perhaps"),
        ("checkpoint.attempts", "0"),
        ("checkpoint.attempts", ""),
        ("checkpoint.attempts", "3.5"),
        ("checkpoint.deadline_seconds", "99999999d"),
        ("checkpoint.leave", "Running"),
        ("server.listen", "nowhere"),
        ("log.level", "loud"),
    ],
)
def test_a_bad_value_is_named_with_its_key_and_source(empty, key, value):
    """The same sentence for the environment and for a flag, each naming where it came from."""
    name = env_name(key)
    shown = re.escape(f"{key} = {value!r}")
    assert re.match(rf"{shown} \(env {name}\): .", refused(file=empty, environ={name: value}).message)
    assert re.match(rf"{shown} \(flag\): .", refused(file=empty, environ={}, flags=[(key, value)]).message)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        pytest.param("checkpoint: {attempts: yes}", "checkpoint.attempts", id="yes is no number"),
        pytest.param("store: {min_free_bytes: on}", "store.min_free_bytes", id="on is no size"),
        pytest.param("gc: {max_age_seconds: .inf}", "gc.max_age_seconds", id="for ever is no duration"),
        pytest.param("gc: {max_age_seconds: .nan}", "gc.max_age_seconds", id="nor is what is no number"),
        pytest.param("gc: {max_age_seconds: -1}", "gc.max_age_seconds", id="time does not run back"),
        pytest.param("store: {path: [/a, /b]}", "store.path", id="a list for a path"),
        pytest.param("store: {path: {a: {b: c}}}", "store.path", id="a mapping for a path"),
        pytest.param('store: {path: "/a\\0b"}', "store.path", id="a NUL in a path"),
        pytest.param("store: {path: !!binary aGk=}", "store.path", id="bytes for a path"),
        pytest.param("store: {path: }", "store.path", id="nothing for a path"),
        pytest.param("node_name: 2026-01-01", "node_name", id="a date for a name"),
        pytest.param("node_name: 0x10", "node_name", id="a number for a name"),
        pytest.param(
            "checkpoint: {rootfs_exclude: 1}", "checkpoint.rootfs_exclude", id="a number for a list"
        ),
        pytest.param(
            "checkpoint: {rootfs_exclude: [1]}", "checkpoint.rootfs_exclude", id="a number in a list"
        ),
        pytest.param("checkpoint: {rootfs_exclude: }", "checkpoint.rootfs_exclude", id="nothing for a list"),
        pytest.param(
            "checkpoint: {rootfs_exclude: {a: b}}", "checkpoint.rootfs_exclude", id="a mapping for one"
        ),
        pytest.param("node_name: [" + "'a', " * 50_000 + "]", "node_name", id="a very long list"),
    ],
)
def test_a_value_of_another_type_in_the_file_is_named(tmp_path, text, key):
    """YAML's guesses are not taken for what they are not, and the sentence stays short."""
    error = refused(file=write(tmp_path, text), environ={})
    assert error.message.startswith(f"{key} = ")
    assert f"(file {tmp_path / 'config.yaml'})" in error.message


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefghijklm", "bcdefghijklmn", strict=True)
)
MERGE_BOMB = "a: &a {x: 1}\n" + "".join(
    f"{name}: &{name} {{<<: [{', '.join([f'*{before}'] * 9)}]}}\n"
    for before, name in zip("abcdefghijklm", "bcdefghijklmn", strict=True)
)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        pytest.param("- a\n- b\n", "mapping", id="a list at the top"),
        pytest.param("just words", "mapping", id="a sentence"),
        pytest.param("1: a\n", "mapping", id="a number for a name"),
        pytest.param("? [a, b]\n: c\n", "YAML", id="a list for a name"),
        pytest.param("a: b: c\n", "YAML", id="no YAML"),
        pytest.param("a: 'b\n", "YAML", id="a quote that does not end"),
        pytest.param("\ta: b\n", "YAML", id="a tab"),
        pytest.param("a: 1\n---\nb: 2\n", "YAML", id="two documents"),
        pytest.param(b"\x7fELF\x00\x01\xff\xfe", "UTF-8", id="a program"),
        pytest.param(b"node_name: \xff\n", "UTF-8", id="Latin-1"),
        pytest.param("node_name: \x1b[2J\n", "YAML", id="a control character"),
        pytest.param("node_name: !!python/object/apply:os.system [id]\n", "YAML", id="a tag that runs code"),
        pytest.param("node_name: 2026-99-99\n", "YAML", id="a day that does not exist"),
        pytest.param(BOMB, "alias", id="a bomb of lists"),
        pytest.param(MERGE_BOMB, "alias", id="a bomb of merged mappings"),
        pytest.param("[" * 100_000, "deeply", id="nested a hundred thousand deep"),
        pytest.param("node_name: a\nnode_name: b\n", "node_name stands twice", id="a name that stands twice"),
        pytest.param("store: {path: /a, path: /b}", "path stands twice", id="also within a section"),
        pytest.param(
            "store: {path: /a}\nstore.path: /b\n", "twice", id="once in a section, once with its dot"
        ),
        pytest.param("k" * 100_000 + ": 1\n", "YAML", id="a very long name"),
        pytest.param("'" + "k" * 1000 + "': 1\n", "not a setting", id="a long name"),
        pytest.param('"\\e[2J": 1\n', r"\\x1b\[2J is not a setting", id="a name that steers a terminal"),
        pytest.param("store: /x\n", "store is not a setting", id="a value for a section"),
        pytest.param("store: {1: x}\n", "store.1 is not a setting", id="a number within a section"),
        pytest.param("#" + "x" * MAX_BYTES, "larger than 1048576 bytes", id="larger than 1 MiB"),
    ],
)
def test_a_file_that_is_no_settings_file_is_refused(tmp_path, content, why):
    """One short printable sentence that names the file, at once, whatever is in it."""
    path = write(tmp_path, content)
    error = refused(file=path, environ={})
    assert re.search(why, error.message)
    assert str(path) in error.message
    assert error.message.isprintable()


@pytest.mark.parametrize(
    "content", ["", "\n", "# all of it is a comment\n", "---\n", "{}", "store:\nsignals:\n", "\ufeff"]
)
def test_a_file_that_says_nothing_changes_nothing(tmp_path, content):
    """Also a section whose lines are all commented out."""
    assert only(tmp_path, content).sources == {}


def test_dotted_names_are_taken_too(tmp_path):
    """A key may be written as it is shown."""
    assert only(tmp_path, "store.workers: 3\n").settings.store.workers == 3


def test_only_a_regular_file_is_read(tmp_path):
    """A FIFO does not block, a device does not fill the memory, an absent file is said."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path in (fifo, Path("/dev/zero"), Path("/dev/null")):
        assert "regular file" in refused(file=path, environ={}).message
    assert "no such settings file" in refused(file=tmp_path / "none", environ={}).message
    assert "no such settings file" in refused(environ={"HIBERNODE_CONFIG": str(tmp_path / "none")}).message
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    for path in (loop, tmp_path):
        assert "cannot read" in refused(file=path, environ={}).message


def test_the_prefix_alone_marks_our_variables(empty):
    """Another program's variable is none of our business."""
    assert load(file=empty, environ={"HIBERNATE": "1", "XHIBERNODE_A": "1", "CRIU": "2"}).sources == {}
    assert refused(file=empty, environ={f"{ENV_PREFIX}": "1"}).message
