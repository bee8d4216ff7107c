# SPDX-License-Identifier: Apache-2.0
"""Flags: both spellings, all of Accelerate's known by name, and the script's own left alone."""

from __future__ import annotations

import re
import sys

import click
import pytest

from farflung.base.errors import Unsupported
from farflung.config.groups import FIRST, GROUPS, group_of
from farflung.config.launch import FIELDS, LaunchSettings, field_named, flags_for
from farflung.config.recipes import RECIPES
from farflung.config.resolve import resolve
from farflung.launch.face import launch
from farflung.launch.options import given
from tests.python import call_farflung


def parse(*arguments: str) -> dict[str, object]:
    return launch.make_context("launch", list(arguments)).params


def test_what_is_not_given_is_not_said():
    assert given(parse("x.py")) == {}


@pytest.mark.parametrize("entry", FIELDS, ids=lambda entry: entry.name)
def test_each_setting_has_its_flags_in_both_spellings(entry):
    for flag in entry.flags:
        for spelling in {flag, flag.replace("_", "-")}:
            said = [spelling] if entry.is_switch else [spelling, "7"]
            value = True if entry.is_switch else "7"
            assert given(parse(*said, "x.py")) == {entry.name: value}


def test_a_file_s_yes_can_be_taken_back():
    assert given(parse("--no_debug", "--no-cpu", "x.py")) == {"debug": False, "use_cpu": False}


def test_what_stands_behind_the_script_is_its_own():
    own = ["--cpu", "--num_processes", "3", "--", "-m", "--help", "--nope=1", "${local_rank}", "", "--", "a b"]
    params = parse("--num-processes=2", "x.py", *own)
    assert (params["script"], list(params["script_args"])) == ("x.py", own)
    assert given(params) == {"num_processes": "2"}


def test_each_flag_of_accelerate_is_done_or_refused_by_name():
    theirs = pytest.importorskip("accelerate.commands.launch").launch_command_parser()
    flags = [(action, flag) for action in theirs._actions for flag in action.option_strings]
    assert len(flags) > 200
    done, refused = set(), {}
    for action, flag in flags:
        if flag in ("-h", "--help"):
            continue
        try:
            parse(*([flag] if action.nargs == 0 else [flag, "1"]), "x.py")
            done.add(flag)
        except Unsupported as error:
            refused[flag] = str(error)
    assert all(message.startswith(flag[:2] + flag[2:].replace("-", "_")) for flag, message in refused.items())
    known = {"--num_processes", "--num-processes", "--cpu", "--mixed_precision", "-m", "--main_process_port", "-q"}
    known |= {flag for _, flag in flags if flag.startswith(("--dynamo", "--fsdp_", "--use_fsdp"))}
    known |= {f"--parallelism_config_{axis}_size" for axis in ("dp_replicate", "dp_shard", "tp", "cp", "sp")}
    assert known <= done
    assert not any("deepspeed" in flag or "fp8" in flag or "tpu" in flag for flag in done)


@pytest.mark.usefixtures("home")
def test_settings_are_written_as_the_flags_that_give_them():
    said = {"elastic": "2:4", "outer_recipe": "diloco", "outer_every": 4, "dynamo_use_fullgraph": False, "quiet": True}
    settings = LaunchSettings.of({**said, "use_cpu": True, "module": True, "log_dir": "a b", "run_dir": "none"})
    words = flags_for(settings)
    assert {"--cpu", "--outer", "--outer-every", "-m", "--no_dynamo_use_fullgraph"} <= {*words}
    assert resolve(given(parse(*words, "x.py"))).settings == settings
    assert "--elastic" not in flags_for(settings, without=["elastic"])


@pytest.mark.usefixtures("home")
def test_flags_say_what_is_so_by_default_where_a_variable_says_otherwise(monkeypatch):
    for name, value in (("mixed_precision", "bf16"), ("dynamo_use_fullgraph", "true"), ("multi_gpu", "true")):
        monkeypatch.setenv(field_named(name).variable, value)
    settings = resolve(given(parse("--mixed_precision", "no", "--no_dynamo_use_fullgraph", "--cpu", "x.py"))).settings
    words = flags_for(settings)
    assert {"--mixed_precision", "no", "--no_dynamo_use_fullgraph"} <= {*words}
    assert resolve(given(parse(*words, "x.py"))).settings == settings


def help_of(capsys, *words):
    with pytest.raises(click.exceptions.Exit):
        parse(*words)
    return capsys.readouterr().out


def titles(said):
    return [line.partition(":")[0] for line in said.splitlines() if line.endswith(":") and not line.startswith(" ")]


def flags_in(said):
    return {word for line in said.splitlines() for word in re.findall(r"(?<= )--?\w+", line[:60])}


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_fits_two_screens_and_names_the_groups(flag, capsys):
    said = help_of(capsys, "--cpu", flag)
    assert len(said.splitlines()) <= 60
    assert max(map(len, said.splitlines())) <= 80
    assert titles(said)[0] == "First flags"
    assert {field_named(name).flags[-1] for name in FIRST} <= flags_in(said)
    assert len(FIRST) == 10
    assert all(f"\n  {group} " in said for group in GROUPS)


@pytest.mark.parametrize("group", GROUPS)
def test_help_of_a_group_has_all_its_flags_and_no_other(group, capsys):
    said = help_of(capsys, "--help", group)
    assert said == help_of(capsys, f"--help={group}")
    assert re.match(rf"Usage: launch .*\n\n{group}: {re.escape(GROUPS[group].about)}:\n", said)
    own = {flag for entry in FIELDS if entry.group == group for flag in entry.flags}
    others = {flag for entry in FIELDS if entry.group != group for flag in entry.flags}
    assert own
    assert own <= flags_in(said)
    assert not others & {line.split()[0].rstrip(",") for line in said.splitlines() if line.startswith("  -")}


def test_help_of_all_has_each_group_and_the_recipes(capsys):
    said = help_of(capsys, "--help", "all")
    assert titles(said) == [*GROUPS, "Of this command"]
    assert {flag for entry in FIELDS for flag in entry.flags} <= flags_in(said)
    shown = " ".join(said.split())
    takes = [
        "mixed_precision no|fp16|bf16|fp8",
        "max_restarts INTEGER",
        "gradient_clipping NUMBER",
        "dynamo_backend TEXT",
    ]
    assert all(f" --{words} " in shown for words in (*takes, "help [GROUP]"))
    assert "two checks of the processes. [0.1]" in shown
    assert not re.search(r"\[(True|False|None|)\]", shown)
    outer = " ".join(said[said.index("\nouter:") : said.index("\nelastic:")].split())
    assert all(f" {name}" in outer for name in RECIPES)


def test_a_group_that_is_none_is_a_wrong_use_with_a_suggestion():
    with pytest.raises(click.UsageError, match=r"no group 'outr' of flags; use one of .* Did you mean `outer`"):
        parse("--help", "outr")


def test_each_setting_is_in_one_group():
    with pytest.raises(KeyError, match="new_setting must be in one of GROUPS"):
        group_of("new_setting")
    assert {entry.group for entry in FIELDS} == {*GROUPS}


@pytest.mark.parametrize(
    ("words", "text", "found"),
    [
        (["--outer", "diloco", "--lr", "1", "--outer-every=4"], "", ["--outer", "--outer-every"]),
        (["--num-processes", "2", "--num-processes", "3"], "", ["--num-processes"]),
        (["--cpu", "--mixed_precision", "bf16", "outer", "-m"], "", []),
        (["--multi-gpu"], "parser.add_argument('--multi_gpu')", []),
        (["--main_process-ip", "a"], "main_process_ip: str = field()", []),
        (["--outer", "x"], "# --outer_lr is for the launcher", ["--outer"]),
    ],
)
def test_flags_of_the_launcher_that_went_to_the_script_are_named_once(words, text, found, home, capsys, monkeypatch):
    monkeypatch.setattr("farflung.launch.run.become", lambda plan: sys.exit(0))
    (home / "train.py").write_text(text)
    assert call_farflung("launch", "--cpu", "train.py", *words) == 0
    said = (
        "{} went to the script, after whose name they stand. If they are for the launcher, write them before train.py"
    )
    assert capsys.readouterr().err == (f"farflung: warning: {said.format(' and '.join(found))}\n" if found else "")
