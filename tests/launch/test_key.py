# SPDX-License-Identifier: Apache-2.0
"""A run's key: how it is made and found, that nothing shows it, and what those without it are told."""

from __future__ import annotations

import re
import time
from contextlib import redirect_stdout
from functools import partial
from urllib.parse import unquote

import pytest

from farflung.address.c10d_transport import C10dTransport
from farflung.address.member_store import LauncherNotes
from farflung.address.run_record import KeyMismatch
from farflung.address.seal import Seal
from farflung.base.errors import ConfigError
from farflung.config import environ
from farflung.config.key import run_key
from farflung.config.launch import LaunchSettings
from farflung.launch import elastic
from farflung.launch.engines.engine import Job
from farflung.launch.engines.kubernetes import Kubernetes
from farflung.launch.engines.ray import Ray
from farflung.launch.engines.slurm import Slurm
from farflung.launch.engines.ssh import Ssh
from farflung.testing.patience import patience
from tests.launch.keyed import KEY, write_key
from tests.launch.screen import launcher
from tests.outer.elastic_run import served
from tests.python import call_farflung
from tests.waits import until

OTHER = "0ff5" * 16


@pytest.fixture
def key_file(home):
    return write_key(home)


def test_the_command_makes_a_key_in_a_new_file_of_ones_own(home, capsys):
    for name in ("a.key", "b.key"):
        assert call_farflung("key", name) == 0
    keys = [run_key(home / name) for name in ("a.key", "b.key")]
    assert (len(set(keys)), [len(key) for key in keys], (home / "a.key").stat().st_mode & 0o777) == (2, [32, 32], 0o600)
    assert (call_farflung("key"), len(capsys.readouterr().out)) == (0, 65)  # into no file
    for name, why in ("a.key", "'a.key' is there already"), ("no/a.key", "'no/a.key' can't be made: No such file"):
        assert call_farflung("key", name) != 0
        assert why in capsys.readouterr().err
    assert run_key(home / "a.key") == keys[0]


@pytest.mark.parametrize(("mode", "code"), [(0o600, 0), (0o644, 2), (0o620, 2)])
def test_no_key_is_printed_into_a_file_that_others_may_open(home, capsys, mode, code):
    file = home / "a.key"
    file.touch()
    file.chmod(mode)
    with open(file, "w") as out, redirect_stdout(out):
        assert call_farflung("key") == code
    assert len(file.read_text()) == (65 if code == 0 else 0)
    assert (f"others may open (mode {mode:o})" in capsys.readouterr().err) is (code != 0)


@pytest.mark.parametrize(
    ("content", "mode", "variable", "why"),
    [
        (KEY, 0o640, None, r"others on this machine may read .*\(mode 640\)"),
        (KEY, 0o602, None, r"others on this machine may read or write it|\(mode 602\)"),
        (KEY[1:], 0o600, None, r"key_file .*run7.key' holds no key of a run: 64 hex"),
        ("", 0o600, None, "holds no key of a run"),
        (None, 0o600, None, "can't be read: No such file"),
        (KEY, 0o600, OTHER, "is not the one in FARFLUNG_KEY"),
        (KEY, 0o600, KEY[:-1], "FARFLUNG_KEY holds no key of a run"),
    ],
)
def test_what_is_no_key_or_may_be_read_by_others_is_refused_and_not_shown(
    key_file, monkeypatch, content, mode, variable, why
):
    if content is None:
        key_file.unlink()
    else:
        key_file.write_text(content)
        key_file.chmod(mode)
    if variable is not None:
        monkeypatch.setenv(environ.KEY, variable)
    with pytest.raises(ConfigError, match=why) as refused:
        run_key(str(key_file))
    assert not re.search("5eed|0ff5", str(refused.value))


def test_a_key_is_found_in_a_file_or_in_the_environment(key_file, monkeypatch):
    assert run_key() is None
    monkeypatch.setenv(environ.KEY_FILE, str(key_file))
    assert run_key() == bytes.fromhex(KEY)
    monkeypatch.setenv(environ.KEY, KEY)
    assert run_key() == run_key(str(key_file)) == bytes.fromhex(KEY)
    monkeypatch.delenv(environ.KEY_FILE)
    assert run_key() == bytes.fromhex(KEY)


@pytest.mark.parametrize("given", ["file", "variable"])
def test_engines_carry_the_key_unseen_or_say_how_it_gets_there(home, key_file, monkeypatch, given):
    if given == "variable":
        monkeypatch.setenv(environ.KEY, KEY)

    def job(engine, **more):
        named = {"key_file": str(key_file)} if given == "file" else {}
        where = {"elastic": "1:2", "meet": "s3://bucket/run", "engine": engine}
        return Job(LaunchSettings(**where, **named, **more), "train.py", (), home / "run")

    by_ssh = Ssh(job("ssh", hosts="a,b"))
    assert by_ssh._key == bytes.fromhex(KEY)  # which goes to the tether's stdin
    assert "--key" in by_ssh.described()
    assert not re.search(f"{KEY}|key_file", by_ssh.described())
    with pytest.raises(ConfigError, match=r"stays on this machine. `kubectl create secret .*--engine_options secret="):
        Kubernetes(job("kubernetes", engine_options="image=x"))
    for engine, kind in (("slurm", Slurm), ("ray", Ray)):
        if given == "variable":
            with pytest.raises(ConfigError, match=r"FARFLUNG_KEY, which stays on this machine. .*have --key_file name"):
                kind(job(engine))
        else:
            words = " ".join(kind(job(engine))._job.command())
            assert f"--key_file {key_file}" in words


KEYS = {"a key": KEY, "another": OTHER}
AT_PORT = "127.0.0.1 was refused at the port of this run: "
NO_TAG = "refused node:1' is not taken, as its name has no tag"
ONE_SIDE = "node:1 was refused: it has another key, or only one side has"
# Whose key the run and the launcher have, and what is said at the launcher and at the run: of a store, of an address.
MISMATCHES = [
    ("store", "a key", "another", "it has another key", f"{AT_PORT}it has another key"),
    ("store", "a key", "none", "it has a key", f"{AT_PORT}it has no key"),
    ("store", "none", "a key", "it has no key", "127.0.0.1 was refused: it has a key"),
    ("address", "a key", "another", "it is sealed with another key", NO_TAG),
    ("address", "a key", "none", "it has a key, and none was given", NO_TAG),
    ("address", "none", "a key", "it is not sealed with any key", ONE_SIDE),
]
IN_BUCKETS = [pytest.param("bucket", *row, marks=pytest.mark.long) for kind, *row in MISMATCHES if kind == "address"]


@pytest.mark.parametrize(("kind", "theirs", "ours", "here", "there"), [*MISMATCHES, *IN_BUCKETS])
def test_one_that_joins_a_run_with_another_key_is_refused_on_both_sides(
    kind, theirs, ours, here, there, tmp_path, request
):
    began = time.monotonic()
    its, own = (Seal(bytes.fromhex(KEYS[name])) if name in KEYS else None for name in (theirs, ours))
    if kind == "store":
        store = served(its)
        where, first = f"127.0.0.1:{store.port}", C10dTransport(store, seal=its)
        first.board.put("run", b"{}")

        def join():
            elastic._found(C10dTransport(("127.0.0.1", store.port), seal=own), "join", where)

    else:
        where = request.getfixturevalue("bucket") if kind == "bucket" else tmp_path.as_uri()
        settings = LaunchSettings(elastic="1:2", meet=where)
        first = elastic._met(settings, 1, "node:0", its)
        join = partial(elastic._met, settings, 1, "node:1", own)
    with pytest.raises(KeyMismatch, match=f"The record of the run at {where} can't be used: {here}"):
        join()
    notes = LauncherNotes(first.board)
    (event,) = until(lambda: [*notes.receive(), *notes.strangers()])
    assert there in unquote(str(event))
    assert time.monotonic() < began + patience(10)


@pytest.mark.long
@pytest.mark.usefixtures("warm")
def test_nothing_shows_a_runs_key_and_its_state_is_not_read_without_it(home, key_file, capfd, monkeypatch):
    where, folder = f"file://{home}/run", home / "kept"
    mine = "--elastic", "1:2", "--meet", where, "--key_file", "run7.key", "--run_dir", str(folder)
    mine = *mine, "--tee", "3", "--debug", "train.py"
    assert call_farflung("launch", "--cpu", *mine[:-1], "--dry_run", "train.py") == 0
    shown = capfd.readouterr().out
    with launcher(*mine) as run:
        run.wait_for("training begins with 1 replica")
        until(lambda: (home / "at").exists())
        assert call_farflung("checkpoint", "pull", where, "x.safetensors") == 2
        assert "can't be used: it has a key" in capfd.readouterr().err
        (home / "last").write_text("1")
        assert run.ended() == 0
    assert call_farflung("checkpoint", "pull", where, "x.safetensors", "--key_file", "run7.key") == 0
    assert call_farflung("report", str(folder), "--out", "page.html") == 0
    output = capfd.readouterr()
    texts = [shown, output.out, output.err, run.text]
    texts += [path.read_bytes().decode(errors="replace") for path in home.rglob("*") if path.is_file()]
    processes = (folder / "logs" / "replica").parent.rglob("*")
    assert any("--key_file run7.key" in path.read_text() for path in processes if path.is_file())  # as `ps` shows it
    assert sum(KEY in text for text in texts) == 1  # in the file of the key itself
