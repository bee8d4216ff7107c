# SPDX-License-Identifier: Apache-2.0
"""The command answers at once, loads what is asked for only, and says what is wrong in one line."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import click
import pytest
from click.testing import CliRunner

from farflung.base.errors import ConfigError
from farflung.config import environ
from farflung.config.launch import FIELDS
from farflung.launch import main as command
from farflung.launch.checkpoint import checkpoint
from farflung.launch.codes import USAGE
from farflung.launch.plan import usable_cores
from tests.python import call_farflung, run_python

LOADS = """
import sys
from farflung.launch.main import farflung
for line in ("--help", "checkpoint --help", "launch --help", "launch --help all"):
    farflung.main(line.split(), standalone_mode=False)
    assert not {"torch", "rich", "yaml", "farflung.launch.start"} & sys.modules.keys(), line
for line in ("plan --help", "config show"):
    farflung.main(line.split(), standalone_mode=False)
    assert not {"torch", "rich"} & sys.modules.keys(), line
"""


def test_help_and_the_launcher_do_without_torch(home):
    done = run_python("-c", LOADS)
    printed = " ".join(done.stdout.split())
    assert all(f" {name} {about} " in printed for name, (_, about) in command.COMMANDS.items())


EACH_ENDS = """
import sys
from farflung.launch.main import main
for line in {lines}:
    try:
        main(line)
    except SystemExit as ended:
        assert ended.code == (0 if line[-1] == "--help" else 2), (line, ended.code)
    assert "torch" not in sys.modules, line
"""


def test_each_option_of_each_command_says_what_it_does(home):
    commands = [[name] for name in command.COMMANDS] + [["checkpoint", name] for name in checkpoint.commands]
    for words in [*commands, ["launch", "--help", "all"]]:
        lines = CliRunner().invoke(command.farflung, [*words, "--help"][: len(words) + 1]).output.splitlines()
        for line, after in zip(lines, [*lines[1:], ""], strict=True):
            if re.match(" +-", line):
                assert re.search(r"\S  +\S", line) or after.startswith(" " * 8), (words, line)


def test_no_command_loads_torch_before_it_has_read_its_arguments(home):
    commands = [[name] for name in command.COMMANDS] + [["checkpoint", name] for name in checkpoint.commands]
    lines = [[*words, last] for words in commands for last in ("--nope", "--help")] + [
        *(["checkpoint", "ls"], ["checkpoint", "verify", "gone"], ["checkpoint", "diff", "."]),
        *(["checkpoint", "convert", "--to", "x", ".", "y"], ["checkpoint", "convert", "--to", "farflung", ".", "."]),
        *(["plan", "--parameters", "x"], ["demo", "--steps", "x"], ["demo", "--bandwidth", "x"]),
        *(["launch", "--help", "gone"], ["launch", "--only_rank", "x", "gone.py"], ["test", "x"], ["config", "x"]),
        *(["launch", "gone.py"], ["launch", "--cpu", "--num_processes", "x", "train.py"], ["env", "x"], ["lunch"]),
    ]
    run_python("-c", EACH_ENDS.format(lines=lines))


@pytest.mark.parametrize("name", command.ELSEWHERE)
def test_accelerates_other_commands_are_answered_by_name(name, capsys):
    assert call_farflung(*name.split(), "--config_file", "x.yaml") == 2
    assert capsys.readouterr().err.startswith(f"Unsupported: There is no `farflung {name}`. ")


LONG = "x" * 3000 + " y" * 1500  # one long word, and many short ones


def said_of(capsys, *arguments, line=""):
    """What a command says of a wrong value, stated by an argument or by a line of a file."""
    file = Path("farflung.yaml")
    file.write_text(line)
    assert call_farflung(*arguments) in (0, 2), arguments
    file.unlink()
    return capsys.readouterr().err


def test_a_long_value_is_cut_wherever_it_is_repeated(home, capsys, monkeypatch):
    monkeypatch.setattr("farflung.launch.run.become", lambda plan: sys.exit(0))  # where any text will do
    (home / "train.py").touch()
    launch, messages = ("launch", "--cpu", "train.py"), []
    for entry in FIELDS:
        if not entry.is_switch:
            messages.append(said_of(capsys, "launch", "--cpu", entry.flags[0], LONG, "train.py"))
        with environ.patched({entry.variable: LONG}):
            messages.append(said_of(capsys, *launch))
        if entry.in_file:
            messages.append(said_of(capsys, *launch, line=f"{entry.name}: '{LONG}'"))
    for line in ("{}", "'{}': 1", "debug: [{}", "debug: !{}", "outer: {{recipe: '{}'}}", "- {}"):
        messages.append(said_of(capsys, *launch, line=line.format(LONG)))
    with environ.patched({f"FARFLUNG_{LONG}": "1"}):
        messages.append(said_of(capsys, *launch))
    plan = ("plan", "--parameters", "1M", "--steps", "100", "--step_seconds", "1", "--bandwidth", "1Gbit")
    for words in (
        *([], ["-c"], [f"--{LONG}"], ["env"], ["env", f"--{LONG}"]),
        *(["launch"], ["launch", "-m"], ["launch", "--no_python"]),
        *(["config"], ["config", "show", "--config_file"], ["config", "default", "--config_file"]),
        *(["checkpoint"], ["checkpoint", "ls"], ["checkpoint", "ls", "."], ["checkpoint", "diff", "."]),
        *(["checkpoint", "convert", ".", "y", option] for option in ("--to", "--model")),
        ["checkpoint", "convert", "--to", "farflung", "."],
        *([*plan, option.opts[0]] for option in command.farflung.get_command(None, "plan").params),
        *(["demo", option] for option in ("--steps", "--size", "--bandwidth", "--data")),
    ):
        messages.append(said_of(capsys, *words, LONG))
    assert max(map(len, messages)) < 2000, max(messages, key=len)
    assert sum("xxx" in each for each in messages) > 200, "the values are shown"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        *((KeyboardInterrupt, 130), (click.Abort, 130), (ConfigError, 2), (SystemExit(3), 3)),
        (PermissionError(13, "Permission denied", "/home/other/run"), 2),
        (OSError(2, "gone"), None),  # which is no user's
    ],
)
def test_the_exit_code_says_how_it_ended(error, code, monkeypatch):
    monkeypatch.setattr(command.farflung, "main", Mock(side_effect=error))
    with pytest.raises(SystemExit if code else OSError) as ended:
        command.main()
    assert getattr(ended.value, "code", None) == code


def test_a_command_whose_reader_has_ended_ends_as_by_sigpipe(home):
    words = (sys.executable, "-c", "from farflung.launch.main import main; main(['config', 'show'])")
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as started:
        started.stdout.close()
        said = started.stderr.read()
    assert (started.returncode, said) == (141, b"")


@pytest.mark.parametrize("words", ["launch --cpu /train.py", "report", "watch", "doctor", "env", "test", "demo"])
def test_a_current_folder_that_is_gone_is_refused_in_a_line(words, home, monkeypatch, capsys):
    (home / "gone").mkdir()
    monkeypatch.chdir(home / "gone")
    (home / "gone").rmdir()
    assert call_farflung(*words.split()) == USAGE
    said = "ConfigError: The current folder is gone (No such file or directory). Change to one that is there.\n"
    assert capsys.readouterr().err == said


def test_a_terminal_has_the_kind_of_an_error_in_red(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert call_farflung("launch", "gone.py") == 2
    assert capsys.readouterr().err.startswith("\x1b[31m\x1b[1mConfigError\x1b[0m: The script")


def test_answers_that_end_before_the_questions_are_said_to(home, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("yes\n"))
    assert (call_farflung("config"), capsys.readouterr().err) == (130, "Aborted!\n")
    assert not (home / ".config").exists()


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(
    ("module", "words", "code"),
    [
        ("launch --cpu train.py x", r"\['train.py', 'x'\]", 0),
        ("accelerate_cli launch --cpu train.py", r"\['train.py'\]", 0),
        ("env", rf"torch: 2[\s\S]*\ncores: {usable_cores()}\ngpus: \d+\nsettings: defaults\n  .*# default\n", 0),
        ("env --config_file gone.yaml", r"gpus: \d+\n[\s\S]*ConfigError: .*gone\.yaml", 2),
        ("estimate --dtypes int9 bert", "invalid choice: 'int9'", 2),
        ("merge folder out", "There is no `farflung merge-weights`", 2),
        ("accelerate_cli to-fsdp2", "--config_file", 2),
        ("accelerate_cli estimate-memory -h", "usage: farflung estimate", 0),
    ],
)
def test_accelerates_modules_that_are_commands_are_commands_here(module, words, code, home):
    (home / "train.py").write_text("import sys\nprint(sys.argv)\n")
    done = run_python("-m", *f"farflung.commands.{module}".split(), code=None)
    assert done.returncode == code
    assert re.search(words, done.stdout + done.stderr), done
