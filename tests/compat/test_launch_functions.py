# SPDX-License-Identifier: Apache-2.0
"""The launcher as functions: what Accelerate's do with the same command lines."""

import argparse
import os
import sys
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from accelerate import big_modeling as their_models
from accelerate.commands import launch as theirs
from accelerate.utils import launch as their_utils

from farflung import big_modeling as our_models
from farflung.base.errors import ConfigError, Unsupported
from farflung.commands import launch as ours
from farflung.utils import clear_environment, launch as our_utils, patch_environment


def parsed(line):
    """The arguments of a command line, by our parser and by Accelerate's."""
    return [module.launch_command_parser().parse_args(line.split()) for module in (ours, theirs)]


@contextmanager
def environment(**variables):
    with clear_environment(), patch_environment(HOME="/tmp", **variables):
        yield


LINES = [
    "--cpu --num_processes 1 train.py --lr 0.1",
    "--num-processes 2 --num-machines 1 --mixed-precision bf16 --main_process_port 29511 train.py --cpu",
    "--module --mixed_precision=fp16 package.train --num_processes 3",
    "--gpu_ids 0,1 --debug --dynamo_backend inductor --dynamo_mode default train.py",
]


@pytest.mark.parametrize("line", LINES)
def test_a_command_line_is_parsed_as_there(line):
    mine, other = parsed(line)
    assert (mine.training_script, mine.training_script_args) == (other.training_script, other.training_script_args)
    for name in ("num_processes", "num_machines", "mixed_precision", "main_process_port", "module", "gpu_ids", "debug"):
        if getattr(mine, name) is not None:
            assert getattr(mine, name) == getattr(other, name), name


def test_flags_that_are_not_done_or_not_known(capsys):
    with pytest.raises(Unsupported, match="DeepSpeed"):
        ours.launch_command_parser().parse_args(["--zero_stage", "2", "train.py"])
    args, _ = parsed("--multi-gpu --use-deepspeed train.py")
    assert (args.multi_gpu, args.use_deepspeed, args.tpu) == (True, True, False)
    with pytest.raises(Unsupported, match="--use_deepspeed asks for DeepSpeed"):
        ours.launch_command(args)
    with pytest.raises(ConfigError, match="does not exist"):
        ours.launch_command(parsed("--cpu no_such_script.py")[0])
    with pytest.raises(SystemExit):
        ours.launch_command_parser().parse_args(["--nothing", "train.py"])
    assert "--nothing" in capsys.readouterr().err


def test_the_command_and_environment_of_one_process_are_told():
    mine, other = parsed("--cpu --mixed_precision bf16 --num_cpu_threads_per_process 3 -m package.train x")
    other.num_processes, other.num_machines, other.dynamo_backend = 1, 1, "no"
    our_prepare, their_prepare = (utils.prepare_simple_launcher_cmd_env for utils in (our_utils, their_utils))
    with environment(KEPT="1"):
        (command, told), (their_command, their_told) = our_prepare(mine), their_prepare(other)
        assert command == their_command == [sys.executable, "-m", "package.train", "x"]
        for name in ("KEPT", "ACCELERATE_MIXED_PRECISION", "OMP_NUM_THREADS"):
            assert told[name] == their_told[name], name
        assert told["ACCELERATE_USE_CPU"].lower() == their_told["ACCELERATE_USE_CPU"].lower() == "true"
        mine.no_python = other.no_python = True
        mine.module = other.module = None
        assert our_prepare(mine)[0] == their_prepare(other)[0] == ["package.train", "x"]


def test_the_environment_of_several_processes_is_told():
    mine, other = parsed("--num_processes 2 --mixed_precision fp16 --main_process_port 0 --gpu_ids 1,2 train.py")
    other.num_machines, other.dynamo_backend, other.num_cpu_threads_per_process = 1, "no", 1
    with environment():
        told, their_told = our_utils.prepare_multi_gpu_env(mine), their_utils.prepare_multi_gpu_env(other)
    for name in ("ACCELERATE_MIXED_PRECISION", "CUDA_VISIBLE_DEVICES"):
        assert told[name] == their_told[name], name


def test_the_grid_of_ranks_is_told():
    sizes = "--parallelism_config_dp_replicate_size 2 --parallelism_config_dp_shard_size 2"
    mine, other = parsed(f"--num_processes 4 {sizes} train.py")
    with environment():
        told = our_utils.prepare_extend_env_parallelism_config(mine, {"BEFORE": "1"})
        their_told = their_utils.prepare_extend_env_parallelism_config(other, {"BEFORE": "1"})
    assert told.items() <= their_told.items()
    assert {name for name in told if "DP_" in name} == {name for name in their_told if "DP_" in name}


SCRIPT = """
import os, sys
from farflung import Accelerator
accelerator = Accelerator()
with open(f"{sys.argv[1]}.{accelerator.process_index}", "w") as file:
    file.write(f"{os.environ['ACCELERATE_MIXED_PRECISION']} {accelerator.num_processes}")
sys.exit(int(sys.argv[2]))
"""


@pytest.mark.usefixtures("warm")
def test_a_script_is_run_and_its_end_waited_for(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    ours.launch_command(parsed(f"--cpu --num_processes 2 --mixed_precision bf16 {script} {tmp_path}/out 0")[0])
    assert [(tmp_path / f"out.{rank}").read_text() for rank in range(2)] == ["bf16 2", "bf16 2"]
    with pytest.raises(SystemExit) as ended:
        ours.launch_command(parsed(f"--cpu {script} {tmp_path}/one 3")[0])
    assert ended.value.code == 3
    assert ours.multi_gpu_launcher is ours.simple_launcher is ours.launch_command


def test_arguments_are_filtered_as_there():
    parser = argparse.ArgumentParser()
    parser.add_argument("--nnodes", default="1")
    parser.add_argument("script")
    given = argparse.Namespace(nnodes="3", script="x.py", other=1)
    mine, other = (utils._filter_args(given, parser, ["y.py"]) for utils in (our_utils, their_utils))
    assert vars(mine) == vars(other)


@pytest.mark.parametrize("kind", ["NO", "MULTI_CPU", "MULTI_GPU"])
@pytest.mark.parametrize("utils", [our_utils, their_utils])
def test_a_function_is_told_its_rank_as_there(utils, kind):
    function = Mock(side_effect=lambda *_: variables.update(os.environ))
    variables = {}
    with clear_environment(), patch_environment(NPROC=4, NODE_RANK=2):
        utils.PrepareForLaunch(function, kind)(1, "a", "b")
    function.assert_called_once_with("a", "b")
    assert variables["FORK_LAUNCHED"] == "1"
    assert (variables.get("RANK"), variables.get("LOCAL_RANK")) == ((None, None) if kind == "NO" else ("9", "1"))


def test_a_command_line_is_completed_by_the_file_as_there(tmp_path):
    file = tmp_path / "default.yaml"
    file.write_text("distributed_type: MULTI_CPU\nuse_cpu: true\nnum_processes: 4\n")
    args = parsed(f"--config_file {file} --num_machines 1 --mixed_precision bf16 train.py --lr 1")
    with environment():
        found = [module._validate_launch_command(one) for module, one in zip((ours, theirs), args, strict=True)]
        (mine, defaults, from_file), (other, _, their_from_file) = found
        told = our_utils.prepare_multi_gpu_env(mine)
    assert from_file is their_from_file is False
    for name in ("num_processes", "num_machines", "mixed_precision", "use_cpu", "training_script_args"):
        assert getattr(mine, name) == getattr(other, name), name
    assert defaults.num_processes == 4
    assert (told["ACCELERATE_USE_CPU"], told["ACCELERATE_MIXED_PRECISION"]) == ("true", "bf16")


@pytest.mark.parametrize("models", [our_models, their_models])
def test_layers_with_a_state_along_the_sequence_are_refused_as_there(models):
    refuse = models._refuse_recurrent_layers_under_sequence_parallelism
    refuse(SimpleNamespace(config=SimpleNamespace(layer_types=["full_attention"])))
    refuse(SimpleNamespace())
    with pytest.raises(ValueError, match="linear_attention"):
        refuse(SimpleNamespace(config=SimpleNamespace(layer_types=["full_attention", "linear_attention"])))


@pytest.mark.parametrize("utils", [our_utils, their_utils])
def test_the_arguments_get_what_torchruns_parser_calls_otherwise(utils):
    args = parsed("--num_processes 4 --num_machines 2 --main_process_ip 10.0.0.1 train.py")[utils is their_utils]
    args.machine_rank, args.main_process_port, args.same_network = 1, 29511, True
    args.mixed_precision, args.dynamo_backend, args.num_cpu_threads_per_process = "no", "no", 1
    with environment():
        utils.prepare_multi_gpu_env(args)
    assert (args.nproc_per_node, args.nnodes, args.node_rank) == ("2", "2", 1)
    assert (args.master_addr, args.master_port) == ("10.0.0.1", "29511")
    args = argparse.Namespace(**{**vars(args), "num_machines": 1, "machine_rank": 0, "main_process_port": 0})
    args.main_process_ip = "127.0.0.1" if utils is their_utils else None
    with environment():
        utils.prepare_multi_gpu_env(args)
    assert int(args.master_port) > 0
