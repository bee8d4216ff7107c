# SPDX-License-Identifier: Apache-2.0
"""What takes a folder or a file refuses the address of a bucket, and doesn't make a folder of that name."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import farflung
from farflung import Accelerator, utils
from farflung.base.checks import check_path, check_place
from farflung.base.errors import ConfigError
from farflung.big_model import offload
from farflung.compat import free_functions
from farflung.config import places
from farflung.config.launch import LaunchSettings
from farflung.launch.checkpoint import convert, pull
from farflung.launch.plan import make_plan
from farflung.trackers.jsonl import JSONLTracker
from farflung.utils import ProfileKwargs, ProjectConfiguration

SRC = Path(farflung.__file__).parent
BUCKET = "s3://bucket/run"
MODEL, NUMBER = torch.nn.Linear(2, 1), torch.ones(1)
DOORS = {
    "save_model": lambda at: Accelerator().save_model(MODEL, at),
    "save": lambda at: Accelerator().save({}, at),
    "free save": lambda at: free_functions.save({}, at),
    "keep_local": lambda at: ProjectConfiguration(keep_local=at),
    "ProfileKwargs": lambda at: ProfileKwargs(output_trace_dir=at),
    "JSONLTracker": lambda at: JSONLTracker("run", at),
    **{f"--{name}": lambda at, name=name: LaunchSettings(**{name: at}) for name in ("run_dir", "log_dir")},
    "--config_file": places.find_file,
    "offload_weight": lambda at: offload.offload_weight(NUMBER, "w", at),
    "offload_state_dict": lambda at: offload.offload_state_dict(at, {"w": NUMBER}),
    "save_offload_index": lambda at: offload.save_offload_index({"w": {}}, at),
    "OffloadedWeightsLoader": lambda at: utils.OffloadedWeightsLoader(save_folder=at),
    "load_checkpoint_in_model": lambda at: utils.load_checkpoint_in_model(MODEL, at),
    "load_state_dict": lambda at: utils.load_state_dict(at),
    "save_fsdp_model": lambda at: utils.save_fsdp_model(None, Accelerator(), MODEL, at),
    "load_fsdp_model": lambda at: utils.load_fsdp_model(None, Accelerator(), MODEL, at),
    "save_fsdp_optimizer": lambda at: utils.save_fsdp_optimizer(None, Accelerator(), None, MODEL, at),
    "load_fsdp_optimizer": lambda at: utils.load_fsdp_optimizer(None, Accelerator(), None, MODEL, at),
    "merge_fsdp_weights": lambda at: utils.merge_fsdp_weights(at, "here"),
    "merge_fsdp_weights to": lambda at: utils.merge_fsdp_weights("here", at),
    "write_basic_config": lambda at: utils.write_basic_config(save_location=at),
    "checkpoint convert": lambda at: invoke(convert, ".", at, "--to", "state-dict"),
    "checkpoint pull": lambda at: invoke(pull, "file:///nowhere", at),
}


def invoke(command, *words):
    CliRunner().invoke(command, words, catch_exceptions=False, standalone_mode=False)


@pytest.mark.parametrize("door", DOORS)
def test_no_door_makes_a_folder_of_an_address(door, home):
    with pytest.raises(ConfigError, match=r"an address\. It must be a path: give a local folder"):
        DOORS[door](BUCKET)
    assert list(home.iterdir()) == []


def test_each_method_of_an_accelerator_that_takes_a_path_is_among_them():
    for file in ("accelerator/checkpoints.py", "compat/fsdp_files.py"):
        for node in ast.walk(ast.parse((SRC / file).read_text())):
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                names = [ast.unparse(argument.annotation or ast.Constant(0)) for argument in node.args.args]
                known = {*DOORS, "save_state", "load_state"}  # the last two take an address
                assert not any("Path_" in name for name in names) or node.name in known, node.name


@pytest.mark.parametrize("scheme", ["gs", "az", "abfs", "hf", "S3"])
def test_every_scheme_is_refused_also_once_a_path_has_joined_its_slashes(scheme):
    for value in (f"{scheme}://bucket/run", Path(f"{scheme}://bucket/run")):
        with pytest.raises(ConfigError, match="an address"):
            check_path("here", value)


def test_paths_that_are_none_of_an_address_and_the_path_in_one():
    for path in ("C:/runs", "C:\\runs", "a:b/c", "./s3:/run", "run"):
        assert check_path("here", path) == Path(path)
    with pytest.raises(ConfigError, match=r"It must be a path: give '/mnt/run'"):
        check_path("here", "file:///mnt/run")
    assert check_path("here", "~/run") == Path.home() / "run"


def test_a_place_is_a_path_or_an_address_however_its_slashes_were_joined():
    for value in ("S3://bucket/run/", "s3:/bucket/run", Path("s3://bucket/run")):
        found = check_place("here", value)
        assert (found, found / "x", found.name, found.parent) == (BUCKET, f"{BUCKET}/x", "run", "s3://bucket")
    assert check_place("here", "file:///mnt/a%20run") == Path("/mnt/a run")
    assert check_place("here", "~/run") == Path.home() / "run"
    for wrong in ("ftp://bucket/run", "s3://"):
        with pytest.raises(ConfigError, match=r"an address is s3://, gs://, az://, hf:// or file://"):
            check_place("here", wrong)


def test_a_launcher_makes_no_folder_of_an_address_that_a_signal_saves_to(home):
    settings = LaunchSettings(save_on_signal=BUCKET, use_cpu=True)
    (home / "train.py").touch()
    make_plan(settings, "train.py", [])
    assert {path.name for path in home.iterdir()} == {"train.py"}


def test_without_a_home_only_what_needs_one_is_refused(home, monkeypatch):
    def nobody(self):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", nobody)
    monkeypatch.setattr(os.path, "expanduser", str)
    assert places.find_file() is None
    with pytest.raises(ConfigError, match="no home folder is known: HOME is not set"):
        utils.write_basic_config()
    assert list(home.iterdir()) == []
