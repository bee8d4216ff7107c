# SPDX-License-Identifier: Apache-2.0
"""The command answers at once, loads what is asked for only, and says what is wrong in one line."""

from __future__ import annotations

import io
import sys
from importlib import import_module
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from farflung.base.errors import ConfigError
from farflung.config import environ
from farflung.config.launch import FIELDS
from farflung.launch import main as command
from tests.python import call_farflung, run_python


def test_help_and_the_launcher_do_without_torch(home):
    loads = (
        "import sys\n"
        "from farflung.launch.main import farflung\n"
        "farflung.main(['--help'], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules and 'rich' not in sys.modules and 'yaml' not in sys.modules\n"
        "farflung.main(['checkpoint', '--help'], standalone_mode=False)\n"
        "farflung.main(['launch', '--help'], standalone_mode=False)\n"
        "farflung.main(['launch', '--help', 'all'], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules and 'rich' not in sys.modules and 'yaml' not in sys.modules\n"
        "assert 'farflung.launch.start' not in sys.modules\n"
        "farflung.main(['config', 'show'], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules and 'rich' not in sys.modules\n"
    )
    done = run_python("-c", loads)
    assert all(name in done.stdout for name in command.COMMANDS)


EACH_ENDS = """
import sys
from farflung.launch.main import main
for line in {lines}:
    try:
        main(line)
    except SystemExit as ended:
        assert ended.code == 2, (line, ended.code)
    assert "torch" not in sys.modules, line
"""


def test_no_command_loads_torch_before_it_has_read_its_arguments(home):
    commands = [[name] for name in command.COMMANDS] + [["checkpoint", name] for name in command.CHECKPOINT]
    lines = [[*words, "--nope"] for words in commands] + [
        *(["checkpoint", "ls"], ["checkpoint", "verify", "gone"], ["checkpoint", "diff", "."]),
        *(["checkpoint", "convert", "--to", "x", ".", "y"], ["checkpoint", "convert", "--to", "farflung", ".", "."]),
        *(["plan", "--parameters", "x"], ["demo", "--steps", "x"], ["demo", "--bandwidth", "x"]),
        *(["launch", "--help", "gone"], ["launch", "--only_rank", "x", "gone.py"], ["test", "x"], ["config", "x"]),
        *(["launch", "gone.py"], ["launch", "--cpu", "--num_processes", "x", "train.py"], ["env", "x"], ["lunch"]),
    ]
    run_python("-c", EACH_ENDS.format(lines=lines))


@pytest.mark.parametrize("group", [command.farflung, command.checkpoint])
def test_each_name_in_a_table_is_a_command(group):
    for name, (place, _) in group.table.items():
        module, attribute = place.split(":")
        found = getattr(import_module(module), attribute)
        assert isinstance(found, click.Command)
        assert group.get_command(click.Context(group), name) is found
        assert CliRunner().invoke(found, ["--help"]).exit_code == 0


@pytest.mark.parametrize("name", command.ELSEWHERE)
def test_accelerates_other_commands_are_answered_by_name(name, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main([*name.split(), "--config_file", "x.yaml"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"Unsupported: There is no `farflung {name}`. ")


def test_errors_of_ours_are_one_line_and_exit_code_2(farflung):
    done = farflung("launch", "--num_processes", "0", "train.py", code=2)
    assert done.stderr == "ConfigError: --num_processes is 0; it must be a whole number, 1 or more.\n"


LONG = "x" * 3000 + " y" * 1500  # one long word, and many short ones


def said_of(capsys, *arguments, line=""):
    """What a command says of a wrong value, stated by an argument or by a line of a file."""
    file = Path("farflung.yaml")
    file.write_text(line)
    with pytest.raises(SystemExit) as ended:
        command.main(list(arguments))
    file.unlink()
    assert ended.value.code in (0, 2), arguments
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
    ("error", "code"), [(KeyboardInterrupt, 130), (click.Abort, 130), (ConfigError, 2), (SystemExit(3), 3)]
)
def test_the_exit_code_says_how_it_ended(error, code, monkeypatch):
    def fail(**_):
        raise error

    monkeypatch.setattr(command.farflung, "main", fail)
    with pytest.raises(SystemExit) as ended:
        command.main([])
    assert ended.value.code == code


def test_answers_that_end_before_the_questions_are_said_to(home, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("yes\n"))
    with pytest.raises(SystemExit) as ended:
        command.main(["config"])
    assert (ended.value.code, capsys.readouterr().err) == (130, "Aborted!\n")
    assert not (home / ".config").exists()


def test_env_tells_versions_and_settings(home, capsys):
    assert call_farflung("env") == 0
    printed = capsys.readouterr().out
    assert "torch: 2" in printed
    assert "settings: defaults" in printed


@pytest.mark.parametrize(
    ("module", "words", "code"),
    [
        ("launch --cpu train.py x", "['train.py', 'x']", 0),
        ("accelerate_cli launch --cpu train.py", "['train.py']", 0),
        ("env", "torch: 2", 0),
        ("estimate --dtypes int9 bert", "invalid choice: 'int9'", 2),
        ("merge folder out", "There is no `farflung merge-weights`", 2),
        ("accelerate_cli to-fsdp2", "--config_file", 2),
        ("accelerate_cli estimate-memory -h", "usage: farflung estimate", 0),
    ],
)
def test_accelerates_modules_that_are_commands_are_commands_here(module, words, code, home):
    (home / "train.py").write_text("import sys\nprint(sys.argv)\n")
    done = run_python("-m", *f"farflung.commands.{module}".split(), code=None)
    assert (done.returncode, words in done.stdout + done.stderr) == (code, True), done
