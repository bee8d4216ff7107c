# SPDX-License-Identifier: Apache-2.0
"""Flags: both spellings, all of Accelerate's known by name, and the script's own left alone."""

from __future__ import annotations

import click
import pytest

from farflung.base.errors import Unsupported
from farflung.config.launch import FIELDS, LaunchSettings, flags_for
from farflung.config.recipes import RECIPES
from farflung.config.resolve import resolve
from farflung.launch.options import given
from farflung.launch.run import launch


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
    everyday = {"--num_processes", "--num-processes", "--cpu", "--mixed_precision", "-m", "--main_process_port", "-q"}
    assert everyday <= done
    assert {flag for _, flag in flags if flag.startswith(("--dynamo", "--fsdp_", "--use_fsdp"))} <= done
    assert {f"--parallelism_config_{axis}_size" for axis in ("dp_replicate", "dp_shard", "tp", "cp", "sp")} <= done
    assert not any("deepspeed" in flag or "fp8" in flag or "tpu" in flag for flag in done)


@pytest.mark.usefixtures("home")
def test_settings_are_written_as_the_flags_that_give_them():
    said = {"elastic": "2:4", "outer_recipe": "diloco", "outer_every": 4, "dynamo_use_fullgraph": False, "quiet": True}
    settings = LaunchSettings.of({**said, "use_cpu": True, "module": True, "log_dir": "a b"})
    words = flags_for(settings)
    assert {"--cpu", "--outer", "--outer-every", "-m", "--no_dynamo_use_fullgraph"} <= {*words}
    assert resolve(given(parse(*words, "x.py"))).settings == settings
    assert "--elastic" not in flags_for(settings, without=["elastic"])


def test_a_flag_that_nobody_knows_gets_a_suggestion():
    with pytest.raises(click.NoSuchOption) as caught:
        parse("--num_proceses", "2", "x.py")
    assert "--num_processes" in (caught.value.possibilities or [])


def test_help_is_in_sections_and_lists_the_recipes(capsys):
    with pytest.raises(click.exceptions.Exit):
        parse("--help")
    said = capsys.readouterr().out
    titles = [line for line in said.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert titles[:4] == ["Processes and machines:", "Script:", "Precision and steps:", "Outer loop:"]
    outer = " ".join(said[said.index("\nOuter loop:") : said.index("\nSharding and islands:")].split())
    assert all(f" {name}" in outer for name in RECIPES)
    assert all(said.count(f" {entry.flags[0]} ") + said.count(f" {entry.flags[0]}, ") >= 1 for entry in FIELDS)
