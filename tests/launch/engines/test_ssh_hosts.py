# SPDX-License-Identifier: Apache-2.0
"""What ssh is asked for and what comes of its answers, by a shell of this machine in place of a host's."""

from __future__ import annotations

import io
import json
import os
import platform
import re
import shutil
import socket
import sys
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

import pytest

from farflung.base.errors import ConfigError
from farflung.config import environ
from farflung.config.engines import Host, parse_hosts
from farflung.launch.codes import DONE, ENGINE, USAGE, EngineFailure
from farflung.launch.engines import ssh
from farflung.launch.engines.probe import pack, probe
from farflung.launch.engines.ssh import SshClient, table_of_differences
from tests.launch.engines.launchers import ENDS, make_python
from tests.launch.engines.test_engine import submitted
from tests.launch.keyed import KEY, write_key
from tests.python import call_farflung

# Stands in for ssh under the real rsync: notes the host, and runs its command here.
HERE = """#!/bin/sh
while case $1 in -T) shift ;; -o | -l) shift 2 ;; *) false ;; esac do :; done
echo "$1" > "$SEEN"
shift
exec sh -c "$*"
"""


@pytest.mark.skipif(shutil.which("rsync") is None, reason="rsync is not installed")
@pytest.mark.parametrize("host", ["me@[fe80::1]", "[::1]", "node0"])
def test_a_folder_is_copied_to_a_host_however_it_is_named(host, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "train.py").write_text("pass")
    for name in (".git", ".venv", "farflung-runs", "__pycache__"):
        (tmp_path / "here" / name).mkdir()
    (tmp_path / "ssh").write_text(HERE)
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    monkeypatch.chdir(tmp_path / "here")
    SshClient({"folder": str(tmp_path / "there")}).rsync(parse_hosts(host))
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["train.py"]
    assert (tmp_path / "seen").read_text().strip() == host.rpartition("@")[2].strip("[]")


def test_hosts_are_a_list_or_a_file(home):
    assert parse_hosts("a, me@b:2,[::1]:3") == (Host("a", None), Host("me@b", 2), Host("::1", 3))
    (home / "hosts").write_text("# all\na\nb slots=4 # fast\n\n")
    assert parse_hosts("hosts") == (Host("a", None), Host("b", 4))
    (home / "hosts").write_bytes(b"\xef\xbb\xbfa\r\nb:2\r\n")  # as editors of Windows write it
    assert parse_hosts("hosts") == (Host("a", None), Host("b", 2))
    assert len(parse_hosts(",".join(f"node{number:03}" for number in range(100)))) == 100  # longer than a file's name
    (home / "hosts").write_bytes(b"\xff\xfea\0")
    with pytest.raises(ConfigError, match="can't be read as text in UTF-8"):
        parse_hosts("hosts")
    (home / "hosts").write_text("a\nb c\n")
    with pytest.raises(ConfigError, match=r"^hosts:2: hosts holds 'b c'"):
        parse_hosts("hosts")


def test_a_dry_run_shows_the_command_of_each_host(home, capsys):
    environ.remove("FARFLUNG_RUN_DIR")
    (home / "train.py").touch()
    assert call_farflung("launch", "--cpu", "--hosts", "a:2,me@b:2", "--dry-run", "train.py") == DONE
    first, second = capsys.readouterr().out.splitlines()[1:]
    assert first.startswith("a: ssh -T -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 -o ServerAliveC")
    assert "ServerAliveCountMax=3 -- a " in first
    assert " -- me@b " in second
    assert "--num_machines 2 --machine_rank 1 --main_process_ip a --main_process_port 29500 --num_processes 4" in second
    assert call_farflung("launch", "--cpu", "--hosts", "a,b:3", "--elastic", "2:8", "--dry-run", "train.py") == DONE
    first, second = capsys.readouterr().out.splitlines()[1:]
    assert "--replicas 1 --meet tcp://a:29500" in first
    assert "--replicas 3 --meet tcp://a:29500" in second
    words = ["--hosts", "a,b", "--elastic", "5:8", "--engine-options", "ssh=-p 7 -i k", "--dry-run", "train.py"]
    assert call_farflung("launch", "--cpu", "--main_process_ip", "10.0.0.5", *words) == DONE
    first, second = capsys.readouterr().out.splitlines()[1:]
    assert "ssh -T -p 7 -i k -o BatchMode=yes" in first  # of what ssh hears twice the first counts
    assert ("--replicas 3" in first, "--replicas 2" in second) == (True, True)
    assert ("--meet tcp://10.0.0.5:29500" in first, "--main_process" in first) == (True, False)


SLIPS = [
    ("--hosts 127.0.0.1 --engine-options ssh=-p1", "  127.0.0.1: ", "Connection refused"),
    ("--hosts no-such-host.invalid", "  no-such-host.invalid: ", "Could not resolve hostname"),
    ("--hosts a,b --cpu --sync", "--sync needs the program rsync, here and on each host.", "This machine has none."),
    ("--hosts a,b --cpu", "There is no program ssh on this machine.", "Install OpenSSH's client."),
]


@pytest.mark.skipif(shutil.which("ssh") is None, reason="OpenSSH's client is not installed")
@pytest.mark.parametrize(("line", "wrong", "meant"), SLIPS, ids=[line for line, *_ in SLIPS])
def test_a_slip_is_answered_with_what_was_wrong_and_what_to_do(line, wrong, meant, home, capsys, monkeypatch):
    (home / "train.py").touch()
    environ.remove("FARFLUNG_RUN_DIR")
    if "--cpu" in line:
        monkeypatch.setenv("PATH", str(home))
    ended = call_farflung("launch", *line.split(), "train.py")
    said = capsys.readouterr().err
    assert ended == ENGINE, said
    assert len(said.splitlines()) <= 15
    assert wrong in said
    assert meant in said
    assert "--engine-options" not in said
    assert not Path("farflung-runs").exists()


MEET, END = "--elastic 1:4 --meet tcp://a:29500", "To end some: end that launch, by Ctrl-C or `farflung cancel`."


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["scale", "run", "3"],
            f"itself. To add replicas: `farflung launch --hosts HOST:n --cpu {MEET} train.py 1`. {END}",
        ),
        (["scale", "old", "3"], f"To add replicas: the `--join` line that it has printed. {END}"),
        (["cancel", "run"], "was started on elsewhere: `farflung cancel run` there ends it"),
        (["follow", "run"], "process 7 on elsewhere shows what it prints"),
    ],
)
def test_what_only_the_launcher_itself_can_do_is_said_in_words(words, said, home, capsys):
    by = {"pid": 7, "host": "elsewhere", "hosts": ["a", "b"]}
    submitted(home, by, use_cpu=True, hosts="a,b", elastic="1:4", replicas=2).rename(home / "old")
    submitted(home, by, use_cpu=True, hosts="a,b", elastic="1:4", meet="tcp://a:29500", replicas=2)
    assert call_farflung(*words) == ENGINE
    assert said in capsys.readouterr().err


@pytest.fixture
def foreign(home, monkeypatch):
    """A host whose login shell prints `words` around what it runs, or runs nothing."""
    (home / "train.py").touch()
    (home / "bin").mkdir()
    environ.remove("FARFLUNG_RUN_DIR")
    monkeypatch.setenv("PATH", f"{home}/bin:{environ.text('PATH')}")

    def make(before="", after="", runs=True, at="10.0.0.1 5 10.0.0.9 22"):
        line = 'sh -c "${!#}"' if runs else "true"
        lines = ["#!/bin/bash", f"export SSH_CONNECTION='{at}'", f"printf %b '{before}'", f"{line} || exit"]
        (home / "bin" / "ssh").write_text("\n".join([*lines, f"printf %b '{after}'", ""]))
        (home / "bin" / "ssh").chmod(0o755)
        return SshClient({})

    return make


@pytest.mark.parametrize(("elastic", "at"), [(None, "10.0.0.9"), ("2:4", "fd00::9")])
def test_hosts_are_asked_given_a_launcher_each_and_what_they_have_comes_back(
    elastic, at, foreign, home, monkeypatch, capsys
):
    foreign(at=f"10.0.0.1 5 {at} 22")
    if elastic:
        monkeypatch.setattr(SshClient, "collect", lambda *words: "no space left")
    key, there = write_key(home), home / "there"
    acts = "number = of('--machine_rank', '0')\n"
    acts += "print('rank', number, os.read(0, 64)[:64 * ('--key' in words)])\nreport('note', message='waits')\n"
    acts += "os.makedirs('run/ranks', exist_ok=True)\nopen(f'run/ranks/{os.getpid()}', 'w').write(words[4])\n" + ENDS
    there.mkdir()
    shutil.copy(home / "train.py", there)
    options = ["--engine-options", f"folder={there},python={make_python(there, acts)}"]
    kind = ["--elastic", elastic, "--key_file", key.name] if elastic else ["--num_processes", "4"]
    code = call_farflung("launch", "--cpu", "--hosts", "a,b", "--run-dir", "run", *kind, *options, "train.py")
    shown, seen = capsys.readouterr(), KEY.encode() if elastic else b""
    assert code == DONE, shown.err
    assert sorted(shown.out.splitlines()) == [f"[a] rank 0 {seen}", f"[b] rank {0 if elastic else 1} {seen}"]
    assert shown.err.count("farflung: waits") == 2
    commands = [json.loads(line) for line in (there / "commands").read_text().splitlines()]
    for words in commands:
        assert words[words.index("--run_dir") + 1] == f"{there}/run"
        assert ("--key" in words, "--key_file" in words) == (bool(elastic), False)
        if elastic:
            assert re.fullmatch(r"tcp://\[fd00::9\]:\d+", words[words.index("--meet") + 1])
            assert words[words.index("--replicas") + 1] == "1"
        else:
            assert words[words.index("--main_process_ip") + 1] == "10.0.0.9"
            assert words[words.index("--num_processes") + 1] == "4"
    lost = [f"what {host} has in {there}/run could not be copied to {home}/run: no space left\n" for host in "ab"]
    assert [line in shown.err for line in lost] == [bool(elastic)] * 2
    assert len(list((home / "run").glob("ranks/*"))) == (0 if elastic else 2)
    handle = json.loads((home / "run" / "engine.json").read_text())["handle"]
    assert (handle["pid"], handle["host"], handle["hosts"]) == (os.getpid(), socket.gethostname(), ["a", "b"])
    assert "identity" in handle  # so that no other process of this number is taken for it


def test_where_hosts_can_not_meet_or_differ_nothing_is_started(foreign, home, monkeypatch, capsys):
    def refused(code: int, *words: str) -> str:
        assert call_farflung("launch", "--cpu", "--hosts", "a,b", *words, "train.py") == code
        return capsys.readouterr().err

    foreign(at="127.0.0.1 5 127.0.0.1 22")
    assert "a was reached at 127.0.0.1, which is each host's own" in refused(USAGE)
    (home / "there").mkdir()
    (home / "there" / "train.py").write_text("other")
    assert "The hosts differ in script; nothing was started. --sync" in refused(ENGINE, "--engine-options=folder=there")
    (home / "there" / "train.py").unlink()
    answer = refused(ENGINE, "--engine-options=folder=there")
    assert "a: there is no train.py in there; --sync copies the folder\n" in answer
    for prints, why in (
        (
            "protocol mismatch -- is your shell clean?",
            "its shell prints something, which rsync can't read: `ssh a true`",
        ),
        *(("rsync: odd\nno disk\n(in main)", "no disk\n"), ("rsync: odd", "rsync: exit code 2\n")),
    ):
        (home / "bin" / "rsync").write_text(f"#!/bin/sh\necho '{prints}' >&2\nexit 2\n")
        (home / "bin" / "rsync").chmod(0o755)
        assert f"  a: {why}" in refused(ENGINE, "--sync")
    monkeypatch.setattr("farflung.launch.engines.ssh._ANSWER_S", 0.01)
    assert "  b: no answer for 0.01 s" in refused(ENGINE)


def test_what_differs_between_hosts_is_a_table_of_that():
    alike = {"python": "3.11.1", "torch": "2.13", "farflung": "1 (a)", "script": "b", "GPUs": 8}
    fine = {"a": alike | {"python": "3.11.9", "torch": "2.13+cpu", "GPUs": 1}, "b": alike | {"GPUs": 1}}
    here = alike | {"python": "3.12.1", "torch": "2.12"}  # it trains nothing
    assert table_of_differences(here, fine, ["GPUs"]) == ""
    for name, value in (("python", "3.12.1"), ("torch", "2.12"), ("farflung", "2 (a)"), ("script", "c"), ("GPUs", 2)):
        text = table_of_differences(here, fine | {"b": fine["b"] | {name: value}}, ["GPUs"])
        assert text.startswith(f"The hosts differ in {name}; nothing was started.")
        assert ("--sync" in text) == (name == "script")
        assert re.search(rf"│ b\s+│ {re.escape(str(value))}\s+│", text)
    many = {f"n{number}": alike for number in range(20)}
    assert [f" n{number} " in table_of_differences(alike | {"script": "c"}, many, []) for number in (7, 8)] == [
        True,
        False,
    ]


@pytest.mark.parametrize("printed", [("Welcome!\\n{}", ""), ("", "bye\\n"), ("no end of a line", '{"a": 1}')])
def test_a_host_may_print_before_and_after_it_answers(printed, foreign):
    found = foreign(*printed).probe([Host("a", None)], "train.py", "script")["a"]
    assert found.pop("port") > 1023
    here = probe("train.py", "script", "10.0.0.1 5 10.0.0.9 22")
    assert found == {name: value for name, value in here.items() if name != "port"}


def test_a_machine_says_what_it_has(home, monkeypatch):
    (home / "train.py").write_text("pass")
    found = probe("train.py", "script")
    assert (found["python"], found["torch"]) == (platform.python_version(), version("torch"))
    assert re.fullmatch(rf"{version('farflung')} \([0-9a-f]{{8}}\)", found["farflung"])
    assert found["script"] == sha256(b"pass").hexdigest()[:8]
    assert found["address"] == ""
    assert [probe(*of)["script"] for of in (("gone.py", "script"), ("gone.x", "module"), ("gone", "program"))] == [
        "missing"
    ] * 3
    (home / "package" / "inner").mkdir(parents=True)
    for name, text in {"__init__.py": "1", "b.py": "2", "a.py": "3", "c.txt": "4"}.items():
        (home / "package" / "inner" / name).write_text(text)
    (home / "sh").write_text("other")
    sh = Path(shutil.which("sh")).read_bytes()
    monkeypatch.syspath_prepend(str(home))
    for of, content in ((("package.inner.a", "module"), b"132"), (("sh", "program"), sh), (("sh", "script"), b"other")):
        assert probe(*of)["script"] == sha256(content).hexdigest()[:8]


@pytest.mark.parametrize("printed", ["1) shell 2) logout\\n", "{}\\n", "\\0377\\n", ""])
def test_a_host_that_runs_no_command_is_a_sentence(printed, foreign):
    shown = "nothing" if not printed else "'.*'"
    words = (
        rf"^10 of 10 hosts .* Nothing was started.\n  a0: its shell printed {shown} and ran no command; `ssh a0 echo h"
    )
    words += r"ello` must print hello\n(.*\n){7}  and 2 more$"
    with pytest.raises(EngineFailure, match=words):
        foreign(printed, runs=False).probe([Host(f"a{k}", None) for k in range(10)], "train.py", "script")


def test_logs_and_lines_come_back_and_nothing_else_whatever_names_they_have(foreign, home):
    there, here = home / "there", home / "here"
    (there / "logs").mkdir(parents=True)
    here.mkdir()
    (there / "logs" / "rank0.log").write_text("a log")
    os.link(there / "logs" / "rank0.log", there / "logs" / "again.log")
    (there / "logs" / "link.log").symlink_to("rank0.log")
    (there / "logs" / "gone.log").symlink_to("nowhere")
    os.mkfifo(there / "logs" / "pipe")
    (there / "events.jsonl").write_text("{}\n")
    (here / "events.jsonl").write_text("[]\n")
    (there / "checkpoint").mkdir()
    with (there / "checkpoint" / "model.safetensors").open("wb") as file:
        file.truncate(100 * 2**30)
    client = foreign("motd\\n")
    assert client.collect(Host("a", None), str(there), here) == ""
    assert {str(path.relative_to(here)) for path in here.rglob("*") if path.is_file()} == {
        *("logs/rank0.log", "logs/again.log", "logs/link.log"),
        "events.jsonl",
    }
    assert (here / "logs" / "link.log").read_text() == "a log"
    assert client.collect(Host("b", None), str(there), here) == ""  # another host with the same disk
    assert (here / "events.jsonl").read_text() == "[]\n{}\n"


def test_a_host_without_this_python_or_the_package_is_told_how_to_name_another(foreign, home):
    foreign()
    (home / "python").write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    (home / "python").chmod(0o755)
    for name, words in (("gone", "name them by"), ("python", "has no farflung or no torch there; another one:")):
        with pytest.raises(EngineFailure, match=rf"{words} --engine-options python=PYTHON"):
            SshClient({"python": str(home / name)}).probe([Host("a", None)], "train.py", "script")


@pytest.mark.parametrize(
    ("flags", "why"),
    [({"runs": False}, "it sent nothing, exit code 0"), ({"before": "x"}, "File exists: '.*/here'")],
)
def test_a_host_that_gives_nothing_back_is_a_reason_and_no_error(flags, why, foreign, home):
    client = foreign(**flags)
    (home / "here").write_text("no folder")
    (home / "there").mkdir()
    (home / "there" / "a.jsonl").touch()
    assert re.search(why, client.collect(Host("a", None), str(home / "there"), home / "here"))
    (home / "there" / "engine.json").touch()  # the folder of this machine, on the same disk
    for there in ("there", "gone"):
        assert foreign().collect(Host("a", None), str(home / there), home / "here") == ""


def test_what_a_second_run_in_a_folder_has_written_comes_back_too_and_nothing_twice(tmp_path):
    there, here = tmp_path / "there", tmp_path / "here"
    (there / "logs").mkdir(parents=True)
    here.mkdir()

    def collect():
        out = io.BytesIO()
        pack(there, "submitted.json", ["logs"], out)
        ssh._unpack(io.BytesIO(out.getvalue()), here)

    for attempt in range(2):
        with (there / "rounds.jsonl").open("a") as rounds:
            rounds.write(f"{attempt}\n")
        (there / "logs" / "rank0.log").write_text(f"attempt {attempt}\n" * (attempt + 1))
        for _ in range(2):  # as two hosts with one disk do
            collect()
        assert (here / "rounds.jsonl").read_text() == "0\n1\n"[: 2 * (attempt + 1)]
        assert (here / "logs" / "rank0.log").read_text() == (there / "logs" / "rank0.log").read_text()
