# SPDX-License-Identifier: Apache-2.0
"""Wrong uses of the command: each is answered by one sentence that names the value, before any process starts."""

from __future__ import annotations

import os
import shlex

import pytest

from farflung.config import environ
from farflung.demo import compare as demo
from farflung.launch import main as command, plan, run

FILES = {
    "train.py": "import farflung\n",
    "plain.txt": "x",
    "broken.yaml": "num_processes: [1\n",
    "list.yaml": "- 1\n",
    "unknown.yaml": "debug: true\nnum_proceses: 2\n",
    "twice.yaml": "debug: true\ndebug: false\n",
    "word.yaml": "num_processes: two\n",
    "block.yaml": "num_processes: {a: 1}\n",
    "both.yaml": "use_cpu: true\ngpu_ids: 0,1\n",
    "deepspeed.yaml": "distributed_type: DEEPSPEED\n",
    "zero.yaml": "deepspeed_config:\n  zero_stage: 2\n",
    "fsdp.yaml": "fsdp_config:\n  fsdp_version: 2\n",
    "outer.yaml": "outer: diloco\n",
    "slip.yaml": "outer:\n  recipe: diloco\n  evry: 4\n",
    "broken.json": "{",
}

# What stands behind `farflung`, and words of the answer.
WRONG = [
    ("", "Usage"),
    ("lunch train.py", "No such command 'lunch'"),
    ("--nope", "No such option '--nope'"),
    ("launch", "Missing argument 'SCRIPT'"),
    ("launch --cpu", "Missing argument 'SCRIPT'"),
    ("launch --nope train.py", "No such option '--nope'"),
    ("launch --num_procesess 2 train.py", "Did you mean --num_processes?"),
    # what is started
    ("launch nowhere.py", "'nowhere.py' does not exist"),
    ("launch ''", "The script '' does not exist"),
    ("launch folder", "'folder' is not a file of Python code"),
    ("launch pipe", "'pipe' is not a file of Python code"),
    ("launch -m no_such_module", "no module 'no_such_module'"),
    ("launch -m os.nowhere", "no module 'os.nowhere'"),
    ("launch -m ''", "no module ''"),
    ("launch -m ..x", "no module '..x'"),
    ("launch -m train.py", "no module 'train.py'"),
    ("launch --no_python no-such-program", "no executable program 'no-such-program'"),
    ("launch --no_python train.py", "no executable program 'train.py'"),
    ("launch --module --no_python train", "exclude each other"),
    # how many
    ("launch --cpu --num_processes 0 train.py", "num_processes is 0"),
    ("launch --cpu --num_processes -3 train.py", "num_processes is -3"),
    ("launch --cpu --num_processes two train.py", "--num_processes is 'two'"),
    ("launch --cpu --num_processes 1.5 train.py", "--num_processes is '1.5'"),
    (
        "launch --cpu --num_processes 100000000 train.py",
        "100000000 processes on this machine's CPU, which has 2 usable",
    ),
    ("launch --num_processes 100000000 train.py", "At most 16 per core can be started, which is 32 here"),
    ("launch --cpu --num_processes 33 train.py", "asks for 33 processes"),
    ("launch --cpu --num_cpu_threads_per_process 0 train.py", "num_cpu_threads_per_process is 0"),
    ("launch --cpu --num_cpu_threads_per_process 100000000 train.py", "100000000 threads"),
    ("launch --cpu --max_restarts -1 train.py", "max_restarts is -1"),
    ("launch --cpu --monitor_interval 0 train.py", "monitor_interval is 0"),
    ("launch --cpu --hang_timeout_s -1 train.py", "hang_timeout_s is -1"),
    ("launch --cpu --hang_timeout_s soon train.py", "--hang_timeout_s is 'soon'"),
    # several machines
    ("launch --cpu --num_machines 0 train.py", "num_machines is 0"),
    ("launch --cpu --num_machines 2 train.py", "main_process_ip is not set"),
    ("launch --cpu --num_machines 2 --main_process_ip 10.0.0.1 --machine_rank 2 train.py", "it must be below 2"),
    ("launch --cpu --machine_rank -1 train.py", "machine_rank is -1"),
    ("launch --cpu --machine_rank 1 train.py", "machine_rank is 1 but num_machines is 1; it must be 0"),
    (
        "launch --cpu --num_machines 2 --main_process_ip 10.0.0.1 --num_processes 3 train.py",
        "a multiple of num_machines",
    ),
    ("launch --cpu --num_machines 2 --main_process_ip 10.0.0.1 --main_process_port 0 train.py", "must agree on one"),
    (
        "launch --cpu --num_processes 2 --main_process_ip nowhere.invalid train.py",
        "main_process_ip is 'nowhere.invalid'",
    ),
    ("launch --cpu --num_machines 2 --main_process_ip 'not a host' train.py", "main_process_ip is 'not a host'"),
    ("launch --cpu --num_machines 2 --main_process_ip 999.1.1.1 train.py", "main_process_ip is '999.1.1.1'"),
    ("launch --cpu --num_machines 2 --main_process_ip 10.0.0.1:29500 train.py", "The port is main_process_port."),
    ("launch --cpu --num_processes 2 --main_process_ip http://node train.py", "main_process_ip is 'http://node'"),
    ("launch --cpu --main_process_port 70000 train.py", "main_process_port is 70000"),
    ("launch --cpu --main_process_port -1 train.py", "main_process_port is -1"),
    ("launch --cpu --main_process_port http train.py", "--main_process_port is 'http'"),
    ("launch --cpu --rdzv_backend etcd train.py", "--rdzv_backend is 'etcd'"),
    ("launch --cpu --rdzv_conf timeout train.py", "rdzv_conf holds 'timeout'"),
    ("launch --cpu --rdzv_conf timeout=soon train.py", "rdzv_conf holds 'timeout=soon'"),
    ("launch --cpu --rdzv_conf tiemout=3 train.py", "rdzv_conf holds 'tiemout=3'"),
    # devices
    ("launch --cpu --multi_gpu train.py", "choose one"),
    ("launch --multi_gpu train.py", "torch finds none on this machine"),
    ("launch --cpu --gpu_ids 0,1 train.py", "gpu_ids is '0,1'"),
    ("launch --gpu_ids 0,1 train.py", "torch finds none on this machine"),
    ("launch --gpu_ids 0,0 train.py", "gpu_ids is '0,0'"),
    ("launch --gpu_ids , train.py", "gpu_ids is ','"),
    ("launch --gpu_ids zero train.py", "gpu_ids is 'zero'"),
    ("launch --gpu_ids -1 train.py", "gpu_ids is '-1'"),
    ("launch --gpu_ids 0 --num_processes 2 train.py", "gpu_ids names 1 GPU (0)"),
    # how it trains
    ("launch --mixed_precision half train.py", "--mixed_precision is 'half'"),
    ("launch --mixed_precision fp8 train.py", "Use bf16"),
    ("launch --cpu --dynamo_backend inductr train.py", "Did you mean `inductor`?"),
    ("launch --dynamo_mode slow train.py", "--dynamo_mode is 'slow'"),
    ("launch --gradient_accumulation_steps 0 train.py", "gradient_accumulation_steps is 0"),
    ("launch --gradient_accumulation_steps many train.py", "is 'many'"),
    ("launch --gradient_clipping -1 train.py", "gradient_clipping is -1"),
    ("launch --gradient_clipping nan train.py", "gradient_clipping is nan"),
    ("launch --main_training_function other train.py", "is 'other'"),
    ("launch --tee 7 --cpu train.py", "tee is '7'"),
    ("launch --log_dir plain.txt --cpu --num_processes 2 train.py", "log_dir is 'plain.txt'"),
    ("launch --log_dir plain.txt/logs --cpu --num_processes 2 train.py", "log_dir is 'plain.txt/logs'"),
    ("launch --log_dir /proc --cpu --num_processes 2 train.py", "log_dir is '/proc'"),
    ("launch --config_file folder --cpu train.py", "The configuration file folder is not a file"),
    ("config show --config_file folder", "The configuration file folder is not a file"),
    ("config default --config_file folder", "folder can't be written"),
    ("config default --config_file plain.txt/a.yaml", "plain.txt/a.yaml can't be written"),
    ("plan --steps 1k --parameters 1e400 --step_seconds 1 --bandwidth 1Gbit", "--parameters is '1e400'"),
    ("plan --steps 1k --parameters 124M --step_seconds 1e400 --bandwidth 1Gbit", "--step_seconds is '1e400'"),
    ("plan --steps 1k --parameters 124M --step_seconds 1 --bandwidth 1e400bit", "--bandwidth is '1e400bit'"),
    ("checkpoint ls broken", "broken/model.safetensors can't be read"),
    ("checkpoint verify broken", "broken/model.safetensors can't be read"),
    # outer loops
    ("launch --cpu --outer hierarchical train.py", "levels"),
    ("launch --cpu --outer dilocco --outer-every 4 train.py", "Did you mean `diloco`?"),
    ("launch --cpu --outer diloco --outer-every 0 train.py", "every is 0"),
    ("launch --cpu --outer diloco --outer-every often train.py", "--outer_every is 'often'"),
    ("launch --cpu --outer-every 4 train.py", "--outer"),
    ("launch --cpu --outer auto --outer-every 4 train.py", "every is for auto to choose. Leave it out"),
    ("launch --cpu --outer diloco --outer-every 4 --outer-seconds 2 train.py", "seconds"),
    ("launch --cpu --outer diloco --outer-every 4 --outer-codec int3 train.py", "Did you mean `int8`?"),
    ("launch --cpu --outer diloco --outer-every 4 --outer-lr inf train.py", "lr is inf"),
    ("launch --cpu --outer diloco --outer-every 4 --outer-momentum 1.5 train.py", "momentum is 1.5"),
    ("launch --cpu --outer noloco --outer-pull 2 train.py", "pull is 2"),
    ("launch --cpu --outer noloco --outer-codec int8 train.py", "pull=0"),
    ("launch --cpu --outer hierarchical --outer-levels nonsense train.py", "'nonsense'"),
    ("launch --cpu --outer streaming_diloco --outer-every 4 --outer-fragments 9 train.py", "fragments is 9"),
    # how ranks share models
    ("launch --cpu --num_processes 4 --fsdp_version 2 train.py", "--fsdp_version is read only with --use_fsdp"),
    ("launch --cpu --num_processes 4 --config_file fsdp.yaml train.py", "fsdp.yaml:2 (fsdp_version) is read only"),
    ("launch --cpu --num_processes 4 --use_fsdp --fsdp_offload_params maybe train.py", "use true or false"),
    ("launch --cpu --use_fsdp --fsdp_sharding_strategy NO_SHARD train.py", "DDP replicates models"),
    ("launch --cpu --use_fsdp --fsdp_state_dict_type LOCAL_STATE_DICT train.py", "Use SHARDED_STATE_DICT"),
    ("launch --cpu --use_fsdp --fsdp_min_num_params 5 train.py", "fsdp_min_num_params is 5, which is for"),
    (
        "launch --cpu --use_parallelism_config --parallelism_config_cp_size 2 train.py",
        "cp_size (2) is 2, but there is 1",
    ),
    ("launch --use_parallelism_config --parallelism_config_sp_size 2 train.py", "sequence parallelism"),
    ("launch --use_parallelism_config --parallelism_config_cp_backend ring train.py", "torch"),
    (
        "launch --cpu --num_processes 4 --use_parallelism_config --parallelism_config_dp_shard_size 3 train.py",
        "(1) times parallelism_config_dp_shard_size (3) is 3, but there are 4 processes",
    ),
    (
        "launch --cpu --use_parallelism_config --parallelism_config_dp_shard_size 2 train.py",
        "is 2, but there is 1 process",
    ),
    (
        "launch --cpu --num_processes 4 --use_fsdp --use_parallelism_config --parallelism_config_dp_replicate_size 4 "
        "train.py",
        "FSDP has nothing to shard over",
    ),
    ("launch --cpu --num_processes 4 --use_fsdp --outer diloco train.py", "--parallelism_config_dp_replicate_size 2"),
    ("launch --cpu --num_processes 4 --island_size 2 train.py", "there is no --outer"),
    ("launch --cpu --num_processes 4 --outer diloco --island_size 3 train.py", "island_size is 3, but there are 4"),
    ("launch --cpu --num_processes 4 --outer diloco --island_size 4 train.py", "a smaller divisor"),
    ("launch --cpu --num_processes 4 --outer diloco --island_size host train.py", "there is one machine"),
    ("launch --cpu --num_processes 4 --outer diloco --island_size two train.py", "island_size is 'two'"),
    ("launch --cpu --num_processes 4 --use_fsdp --island_size 2 train.py", "parallelism_config_dp_shard_size to"),
    # words of other launchers
    ("launch --use_deepspeed train.py", "--use_deepspeed asks for DeepSpeed"),
    ("launch --tpu train.py", "--tpu asks for TPUs"),
    ("launch --nproc_per_node 2 train.py", "Use --num_processes"),
    ("launch --nnodes 2 train.py", "Use --num_machines"),
    ("launch --rdzv_endpoint x:1 train.py", "Use --main_process_ip"),
    ("launch --megatron_lm_tp_degree 2 train.py", "Megatron-LM"),
    # files of settings
    ("launch --config_file nowhere.yaml train.py", "nowhere.yaml"),
    ("launch --config_file folder train.py", "folder"),
    ("launch --config_file pipe train.py", "pipe"),
    ("launch --config_file broken.yaml train.py", "broken.yaml:2"),
    ("launch --config_file broken.json train.py", "broken.json:1"),
    ("launch --config_file list.yaml train.py", "list.yaml:1"),
    ("launch --config_file unknown.yaml train.py", "unknown.yaml:2: unknown key `num_proceses`. Did you mean"),
    ("launch --config_file twice.yaml train.py", "twice.yaml:2: `debug` appears twice"),
    ("launch --config_file word.yaml train.py", "word.yaml:1: num_processes is 'two'"),
    ("launch --config_file block.yaml train.py", "block.yaml:1"),
    ("launch --config_file both.yaml train.py", "gpu_ids is '0,1'"),
    ("launch --config_file deepspeed.yaml train.py", "DEEPSPEED"),
    ("launch --config_file zero.yaml train.py", "`deepspeed_config` asks for DeepSpeed"),
    ("launch --config_file outer.yaml train.py", "outer.yaml:1"),
    ("launch --config_file slip.yaml train.py", "`outer_evry`. Did you mean `outer_every`?"),
    # the other commands
    ("config nope", "No such command 'nope'"),
    ("config --config_file x.yaml show", "--config_file must come after `show`"),
    ("config show --num_processes 0", "num_processes is 0"),
    ("config show --config_file nowhere.yaml", "nowhere.yaml"),
    ("config show extra", "extra"),
    ("config default --mixed_precision half", "mixed_precision is 'half'"),
    ("env --config_file nowhere.yaml", "nowhere.yaml"),
    ("env --config_file broken.yaml", "broken.yaml:2"),
    ("env extra", "extra"),
    ("plan", "Missing --parameters, --step_seconds"),
    ("plan --steps 1k --parameters 1B --step_seconds 1", "Missing --bandwidth."),
    ("plan --steps 1k --parameters many --step_seconds 1 --bandwidth 1Gbit", "--parameters is 'many'"),
    ("plan --steps 1k --parameters 1B --step_seconds soon --bandwidth 1Gbit", "--step_seconds is 'soon'"),
    ("plan --steps 1k --parameters 1B --step_seconds 1 --bandwidth 1", "--bandwidth is '1'"),
    ("plan --steps 1k --parameters 1B --step_seconds 1 --bandwidth 1Gbit --latency 5", "--latency is '5'"),
    ("plan --steps 1k --parameters 1B --step_seconds 1 --bandwidth 1Gbit --replicas 0", "'--replicas': 0"),
    ("plan --steps 1k --parameters 1B --step_seconds 1 --bandwidth 1Gbit --bucket 25", "--bucket is '25'"),
    ("plan --steps 1k --parameters 1B --step_seconds 1 --bandwidth 1Gbit --utilization 1.5", "--utilization is 1.5"),
    ("checkpoint nope", "No such command 'nope'"),
    ("checkpoint ls nowhere", "'nowhere'"),
    ("checkpoint ls plain.txt", "'plain.txt'"),
    ("checkpoint verify folder", "folder"),
    ("checkpoint diff folder", "Missing argument 'OTHER'"),
    ("checkpoint convert nowhere out --to farflung", "'nowhere'"),
    ("demo --processes 1", "'--processes': 1"),
    ("demo --processes 100000000", "--processes asks for 100000000 processes"),
    ("demo --steps 0", "'--steps': 0"),
    ("demo --size huge", "'huge'"),
    ("demo --data nowhere", "nowhere"),
    ("demo --output plain.txt --steps 1", "plain.txt"),
    ("demo --generate x --output nowhere", "nowhere"),
    ("demo extra", "extra"),
]


@pytest.fixture
def answer(home, monkeypatch, capsys):
    """Call the command in the empty home, with some files, on a machine of two cores and no GPU; nothing starts."""
    for name, text in FILES.items():
        (home / name).write_text(text)
    (home / "folder").mkdir()
    (home / "broken").mkdir()
    (home / "broken" / "model.safetensors").symlink_to("nowhere")
    os.mkfifo(home / "pipe")

    def started(*_):
        raise AssertionError("processes were started")

    for module, name in ((run, "become"), (run, "start"), (demo, "start")):
        monkeypatch.setattr(module, name, started)
    monkeypatch.setattr(plan, "usable_cores", lambda: 2)
    monkeypatch.setattr(plan, "count_gpus", lambda: 0)

    def call(line: str) -> tuple[object, list[str]]:
        with pytest.raises(SystemExit) as ended:
            command.main(shlex.split(line))
        printed = capsys.readouterr()
        said = [text for text in printed.err.splitlines() if text.strip() and not text.startswith(("Usage: ", "Try "))]
        return ended.value.code, said

    return call


@pytest.mark.parametrize(("line", "words"), WRONG, ids=[line for line, _ in WRONG])
def test_a_wrong_use_is_answered_by_one_sentence(line, words, answer):
    code, said = answer(line)
    assert code == 2
    if not line:  # no command at all: the help text
        return
    assert len(said) == 1, said
    assert words in said[0]
    assert said[0].startswith(("Error: ", "ConfigError: ", "Unsupported: ", "CheckpointError: "))


def test_the_table_is_long_enough():
    assert len({line for line, _ in WRONG}) == len(WRONG) > 120


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("FARFLUNG_NUM_PROCESSES", "many", "FARFLUNG_NUM_PROCESSES is 'many'"),
        ("ACCELERATE_USE_CPU", "perhaps", "ACCELERATE_USE_CPU is 'perhaps'"),
        ("ACCELERATE_MIXED_PRECISION", "fp8", "ACCELERATE_MIXED_PRECISION is 'fp8'"),
        ("FARFLUNG_CONFIG_FILE", "nowhere.yaml", "nowhere.yaml"),
        ("FARFLUNG_OUTER_EVRY", "4", "Did you mean `FARFLUNG_OUTER_EVERY`?"),
        ("FARFLUNG_GPU_IDS", "0,1", "torch finds none on this machine"),
    ],
)
def test_a_wrong_variable_is_answered_by_one_sentence(variable, value, words, answer):
    environ.export({variable: value})
    code, said = answer("launch train.py")
    assert code == 2
    assert len(said) == 1, said
    assert words in said[0]
