# SPDX-License-Identifier: Apache-2.0
"""The command answers at once, loads what is asked for only, and says what is wrong in one line."""

from __future__ import annotations

import io
import sys
from importlib import import_module

import click
import pytest
from click.testing import CliRunner

from farflung.base.errors import ConfigError
from farflung.launch import main as command
from tests.python import run_python


def test_help_and_the_launcher_do_without_torch(home):
    loads = (
        "import sys\n"
        "from farflung.launch.main import farflung\n"
        "farflung.main(['--help'], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules and 'rich' not in sys.modules and 'yaml' not in sys.modules\n"
        "farflung.main(['checkpoint', '--help'], standalone_mode=False)\n"
        "farflung.main(['launch', '--help'], standalone_mode=False)\n"
        "farflung.main(['config', 'show'], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules and 'rich' not in sys.modules\n"
    )
    done = run_python("-c", loads)
    assert all(name in done.stdout for name in command.COMMANDS)


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
    done = farflung("launch", "--num_processes", "0", "train.py")
    assert done.returncode == 2
    assert done.stderr == "ConfigError: num_processes is 0; it must be at least 1.\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lunch"], "No such command 'lunch'. Did you mean `launch`?"),
        (["lanch", "train.py"], "No such command 'lanch'. Did you mean `launch`?"),
        (["launch", "--num_proceses", "2", "train.py"], "Did you mean --num_processes?"),
        (["launch"], "Missing argument 'SCRIPT'"),
        (["launch", "--nope"], "--nope"),
    ],
)
def test_a_wrong_command_line_is_exit_code_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


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


def test_env_tells_versions_and_settings(farflung):
    done = farflung("env")
    assert done.returncode == 0, done.stderr
    assert "torch: 2" in done.stdout
    assert "settings: defaults" in done.stdout


@pytest.mark.parametrize(
    ("module", "words", "code"),
    [
        ("launch --cpu train.py x", "['train.py', 'x']", 0),
        ("accelerate_cli launch --cpu train.py", "['train.py']", 0),
        ("env", "torch: 2", 0),
        ("estimate bert", "There is no `farflung estimate-memory`", 2),
        ("merge folder out", "There is no `farflung merge-weights`", 2),
        ("test", "There is no `farflung test`", 2),
    ],
)
def test_accelerates_modules_that_are_commands_are_commands_here(module, words, code, home):
    (home / "train.py").write_text("import sys\nprint(sys.argv)\n")
    done = run_python("-m", *f"farflung.commands.{module}".split(), code=None)
    assert (done.returncode, words in done.stdout + done.stderr) == (code, True), done
