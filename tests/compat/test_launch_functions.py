# SPDX-License-Identifier: Apache-2.0
"""The launcher as functions: what Accelerate's do with the same command lines."""

import argparse
import os
import sys
from types import SimpleNamespace

import pytest
from accelerate.big_modeling import _refuse_recurrent_layers_under_sequence_parallelism as their_refuse
from accelerate.commands.launch import _validate_launch_command as their_validate, launch_command_parser as their_parser
from accelerate.utils.launch import (
    PrepareForLaunch as TheirPrepare,
    _filter_args as their_filter,
    prepare_extend_env_parallelism_config as their_extend,
    prepare_multi_gpu_env as their_multi_env,
    prepare_simple_launcher_cmd_env as their_simple,
)

from farflung.base.errors import ConfigError, Unsupported
from farflung.big_modeling import _refuse_recurrent_layers_under_sequence_parallelism
from farflung.commands.launch import (
    _validate_launch_command,
    launch_command,
    launch_command_parser,
    multi_gpu_launcher,
    simple_launcher,
)
from farflung.utils import PrepareForLaunch, _filter_args, clear_environment, patch_environment
from farflung.utils.launch import (
    prepare_extend_env_parallelism_config,
    prepare_multi_gpu_env,
    prepare_simple_launcher_cmd_env,
)

LINES = [
    "--cpu --num_processes 1 train.py --lr 0.1",
    "--num-processes 2 --num-machines 1 --mixed-precision bf16 --main_process_port 29511 train.py --cpu",
    "--module --mixed_precision=fp16 package.train --num_processes 3",
    "--gpu_ids 0,1 --debug --dynamo_backend inductor --dynamo_mode default train.py",
]


@pytest.mark.parametrize("line", LINES)
def test_a_command_line_is_parsed_as_there(line):
    mine, other = (parser().parse_args(line.split()) for parser in (launch_command_parser, their_parser))
    assert (mine.training_script, mine.training_script_args) == (other.training_script, other.training_script_args)
    for name in ("num_processes", "num_machines", "mixed_precision", "main_process_port", "module", "gpu_ids", "debug"):
        if getattr(mine, name) is not None:
            assert getattr(mine, name) == getattr(other, name), name


def test_flags_that_are_not_done_or_not_known(capsys):
    with pytest.raises(Unsupported, match="DeepSpeed"):
        launch_command_parser().parse_args(["--zero_stage", "2", "train.py"])
    args = launch_command_parser().parse_args(["--multi-gpu", "--use-deepspeed", "train.py"])  # as Accelerate's parser
    assert (args.multi_gpu, args.use_deepspeed, args.tpu) == (True, True, False)
    with pytest.raises(Unsupported, match="--use_deepspeed asks for DeepSpeed"):
        launch_command(args)
    with pytest.raises(SystemExit):
        launch_command_parser().parse_args(["--nothing", "train.py"])
    assert "--nothing" in capsys.readouterr().err


def test_the_parser_is_a_command_of_another_one():
    parser = argparse.ArgumentParser()
    launch_command_parser(parser.add_subparsers())
    arguments = parser.parse_args(["launch", "--num_processes", "2", "train.py", "x"])
    assert (arguments.func, arguments.num_processes, arguments.training_script_args) == (launch_command, 2, ["x"])


def test_the_command_and_environment_of_one_process_are_told():
    line = ["--cpu", "--mixed_precision", "bf16", "--num_cpu_threads_per_process", "3", "-m", "package.train", "x"]
    mine, other = (parser().parse_args(line) for parser in (launch_command_parser, their_parser))
    other.num_processes, other.num_machines, other.dynamo_backend = 1, 1, "no"
    with clear_environment(), patch_environment(HOME="/tmp", KEPT="1"):
        (command, told), (their_command, their_told) = prepare_simple_launcher_cmd_env(mine), their_simple(other)
        assert command == their_command == [sys.executable, "-m", "package.train", "x"]
        for name in ("KEPT", "ACCELERATE_MIXED_PRECISION", "OMP_NUM_THREADS"):
            assert told[name] == their_told[name], name
        assert told["ACCELERATE_USE_CPU"].lower() == their_told["ACCELERATE_USE_CPU"].lower() == "true"
        mine.no_python = other.no_python = True
        mine.module = other.module = None
        assert prepare_simple_launcher_cmd_env(mine)[0] == their_simple(other)[0] == ["package.train", "x"]


def test_the_environment_of_several_processes_is_told():
    line = [
        "--num_processes",
        "2",
        "--mixed_precision",
        "fp16",
        "--main_process_port",
        "0",
        "--gpu_ids",
        "1,2",
        "train.py",
    ]
    mine, other = (parser().parse_args(line) for parser in (launch_command_parser, their_parser))
    other.num_machines, other.dynamo_backend, other.num_cpu_threads_per_process = 1, "no", 1
    with clear_environment(), patch_environment(HOME="/tmp"):
        told, their_told = prepare_multi_gpu_env(mine), their_multi_env(other)
    for name in ("ACCELERATE_MIXED_PRECISION", "CUDA_VISIBLE_DEVICES"):
        assert told[name] == their_told[name], name


def test_the_grid_of_ranks_is_told():
    line = ["--num_processes", "4", "--parallelism_config_dp_replicate_size", "2", "--parallelism_config_dp_shard_size"]
    mine, other = (parser().parse_args([*line, "2", "train.py"]) for parser in (launch_command_parser, their_parser))
    with clear_environment(), patch_environment(HOME="/tmp"):
        told = prepare_extend_env_parallelism_config(mine, {"BEFORE": "1"})
        their_told = their_extend(other, {"BEFORE": "1"})
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
    words = ["--cpu", "--num_processes", "2", "--mixed_precision", "bf16", str(script), str(tmp_path / "out"), "0"]
    launch_command(launch_command_parser().parse_args(words))
    assert [(tmp_path / f"out.{rank}").read_text() for rank in range(2)] == ["bf16 2", "bf16 2"]
    with pytest.raises(SystemExit) as ended:
        launch_command(launch_command_parser().parse_args(["--cpu", str(script), str(tmp_path / "one"), "3"]))
    assert ended.value.code == 3
    assert multi_gpu_launcher is simple_launcher is launch_command


def test_settings_that_cannot_work_start_nothing():
    with pytest.raises(ConfigError, match="does not exist"):
        launch_command(launch_command_parser().parse_args(["--cpu", "no_such_script.py"]))


def test_arguments_are_filtered_as_there():
    parser = argparse.ArgumentParser()
    parser.add_argument("--nnodes", default="1")
    parser.add_argument("script")
    given = argparse.Namespace(nnodes="3", script="x.py", other=1)
    assert vars(_filter_args(given, parser, ["y.py"])) == vars(their_filter(given, parser, ["y.py"]))


@pytest.mark.parametrize("kind", ["NO", "MULTI_CPU", "MULTI_GPU"])
@pytest.mark.parametrize("prepare", [PrepareForLaunch, TheirPrepare])
def test_a_function_is_told_its_rank_as_there(prepare, kind):
    seen = []
    with clear_environment(), patch_environment(NPROC=4, NODE_RANK=2):
        prepare(lambda *words: seen.append((words, dict(os.environ))), kind)(1, "a", "b")
    (words, variables) = seen[0]
    assert words == ("a", "b")
    assert variables["FORK_LAUNCHED"] == "1"
    assert (variables.get("RANK"), variables.get("LOCAL_RANK")) == ((None, None) if kind == "NO" else ("9", "1"))


def test_a_command_line_is_completed_by_the_file_as_there(tmp_path):
    file = tmp_path / "default.yaml"
    file.write_text("distributed_type: MULTI_CPU\nuse_cpu: true\nnum_processes: 4\n")
    line = ["--config_file", str(file), "--num_machines", "1", "--mixed_precision", "bf16", "train.py", "--lr", "1"]
    mine, other = (parser().parse_args(line) for parser in (launch_command_parser, their_parser))
    with clear_environment(), patch_environment(HOME="/tmp"):
        (mine, defaults, from_file), (other, _, their_from_file) = _validate_launch_command(mine), their_validate(other)
        told = prepare_multi_gpu_env(mine)
    assert from_file is their_from_file is False
    for name in ("num_processes", "num_machines", "mixed_precision", "use_cpu", "training_script_args"):
        assert getattr(mine, name) == getattr(other, name), name
    assert defaults.num_processes == 4
    assert (told["ACCELERATE_USE_CPU"], told["ACCELERATE_MIXED_PRECISION"]) == ("true", "bf16")


@pytest.mark.parametrize("refuse", [_refuse_recurrent_layers_under_sequence_parallelism, their_refuse])
def test_layers_with_a_state_along_the_sequence_are_refused_as_there(refuse):
    refuse(SimpleNamespace(config=SimpleNamespace(layer_types=["full_attention"])))
    refuse(SimpleNamespace())
    with pytest.raises(ValueError, match="linear_attention"):
        refuse(SimpleNamespace(config=SimpleNamespace(layer_types=["full_attention", "linear_attention"])))


@pytest.mark.parametrize("prepare", [prepare_multi_gpu_env, their_multi_env])
def test_the_arguments_get_what_torchruns_parser_calls_otherwise(prepare):
    theirs = prepare is their_multi_env
    parser = their_parser() if theirs else launch_command_parser()
    args = parser.parse_args(
        ["--num_processes", "4", "--num_machines", "2", "--main_process_ip", "10.0.0.1", "train.py"]
    )
    args.machine_rank, args.main_process_port, args.same_network = 1, 29511, True
    args.mixed_precision, args.dynamo_backend, args.num_cpu_threads_per_process = "no", "no", 1
    with clear_environment(), patch_environment(HOME="/tmp"):
        prepare(args)
    assert (args.nproc_per_node, args.nnodes, args.node_rank) == ("2", "2", 1)
    assert (args.master_addr, args.master_port) == ("10.0.0.1", "29511")
    args = argparse.Namespace(**{**vars(args), "num_machines": 1, "machine_rank": 0, "main_process_port": 0})
    args.main_process_ip = "127.0.0.1" if theirs else None
    with clear_environment(), patch_environment(HOME="/tmp"):
        prepare(args)
    assert int(args.master_port) > 0
