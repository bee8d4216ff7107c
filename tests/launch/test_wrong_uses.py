# SPDX-License-Identifier: Apache-2.0
"""Wrong uses of the command: each is answered by a sentence that names the value and what to do, and nothing starts."""

from __future__ import annotations

import os
import shlex

import pytest

from farflung.config import environ
from farflung.demo import compare as demo
from farflung.launch import main as command, plan, run

FILES = {
    "train.py": "import farflung\n",
    "folder/train.py": "",
    "empty.hosts": "# nobody\n",
    "plain.txt": "x",
    "broken.yaml": "num_processes: [1\n",
    "list.yaml": "- 1\n",
    "deepspeed.yaml": "distributed_type: DEEPSPEED\n",
    "zero.yaml": "deepspeed_config:\n  zero_stage: 2\n",
    "outer.yaml": "outer: diloco\n",
    "slip.yaml": "outer:\n  recipe: diloco\n  evry: 4\n",
    "misspelt.yaml": "mixed_percision: bf16\n",
    "broken.json": "{",
}

TWO, MACHINES = "launch --cpu --num_processes 2", "launch --cpu --num_machines 2 --main_process_ip"
DILOCO, AVERAGED = f"{TWO} --outer diloco", f"{TWO} --outer local_sgd"
UNUSABLE, ANOTHER = "where no folder can be written", "Name another one; it need not exist yet."
CORES = "CPU, which has 2 usable cores. At most 16 per core can be started, which is 32 here."
GRID = "launch --cpu --use_parallelism_config --parallelism_config"
GRID_4 = GRID.replace("--cpu", "--cpu --num_processes 4")
FOLDER, SLURM = "launch --meet file:///run --elastic 1:2", "--engine slurm"
IMAGE = "--engine kubernetes --engine-options image=a"
PLAN = "plan --steps 1k --parameters 1M --step_seconds 1 --bandwidth 1Gbit"  # of what is given twice the last counts
TOO_LARGE = ("parameters 1e400", "step_seconds 1e400", "bandwidth 1e400bit")
OUT_OF_RANGE = (
    *("num_cpu_threads_per_process 0", "max_restarts -1", "monitor_interval 0", "hang_timeout_s -1", "machine_rank -1"),
    *("main_process_port 70000", "main_process_port -1", "gradient_accumulation_steps 0", "gradient_clipping nan"),
    "gradient_clipping 0",
)
# What stands behind `farflung`, and words of the answer.
WRONG = [
    ("", "Usage"),
    ("--nope", "No such option '--nope'"),
    ("launch", "Missing argument 'SCRIPT'"),
    # what is started
    ("launch --multi_gpu nowhere.py", "The script 'nowhere.py' does not exist (looked in /"),
    ("launch ''", "The script '' does not exist"),
    ("launch pipe", "'pipe' is not a file of Python code. Name one, or a module with -m."),
    ("launch -m no_such_module", "no module 'no_such_module', neither here (/", ") nor among those installed."),
    ("launch -m os.nowhere", "no module 'os.nowhere'"),
    ("launch -m ..x", "no module '..x'"),
    ("launch -m train.py", "no module 'train.py'", "A script is named without -m."),
    ("launch --no_python no-such-program", "no executable program 'no-such-program' (--no_python)."),
    # how many
    ("launch --cpu --num_processes 1.5 train.py", "--num_processes is '1.5'"),
    ("launch --num_processes 33 train.py", f"--num_processes asks for 33 processes on this machine's {CORES}"),
    ("launch --cpu --num_processes 33 train.py", f"--num_processes asks for 33 processes on this machine's {CORES}"),
    ("launch --cpu --num_cpu_threads_per_process 33 train.py", "num_cpu_threads_per_process asks for 33 threads on"),
    ("launch --cpu --hang_timeout_s soon train.py", "--hang_timeout_s is 'soon'"),
    *((f"launch --cpu --{row} train.py", row.replace(" ", " is ")) for row in OUT_OF_RANGE),
    # several machines
    ("launch --cpu --num_machines 2 --main_process_ip 10.0.0.1 --machine_rank 2 train.py", "it must be below 2"),
    (f"{MACHINES} 10.0.0.1 --num_processes 3 train.py", "a multiple of num_machines"),
    ("launch --cpu --num_machines 2 --main_process_ip 10.0.0.1 --main_process_port 0 train.py", "must agree on one"),
    (f"{TWO} --main_process_ip a..b train.py", "'a..b', which this machine can't resolve: no host has such a name."),
    ("launch --cpu --num_machines 2 --main_process_ip 'not a host' train.py", "main_process_ip is 'not a host'"),
    ("launch --cpu --num_machines 2 --main_process_ip 10.0.0.1:29500 train.py", "The port is main_process_port."),
    ("launch --cpu --rdzv_conf timeout train.py", "rdzv_conf has timeout=;"),
    ("launch --cpu --rdzv_conf timeout=soon train.py", "rdzv_conf has timeout=soon"),
    ("launch --cpu --rdzv_conf tiemout=3 train.py", "rdzv_conf has the key 'tiemout'"),
    (
        "launch --cpu --rdzv_backend c10d --rdzv_conf rdzv_backend=etcd train.py",
        "rdzv_conf has rdzv_backend=etcd, but rdzv_backend is c10d",
    ),
    (
        "launch --cpu --main_process_ip n0 --main_process_port 8 --rdzv_conf rdzv_endpoint=n0:7 train.py",
        "but main_process_port is 8",
    ),
    # devices
    ("launch --multi_gpu --num_processes 1 train.py", "(multi_gpu), but torch finds none on this machine. Use --cpu"),
    ("launch --gpu_ids 0,1 train.py", "(gpu_ids 0,1), but torch finds none on this machine"),
    *((f"launch --gpu_ids {gpus} train.py", f"gpu_ids is '{gpus}'") for gpus in ("0,0", ",", "-1")),
    ("launch --gpu_ids 0 --num_processes 2 train.py", "gpu_ids names 1 GPU (0)"),
    ("launch --main_training_function other train.py", "is 'other'"),
    ("launch --tee 7 --cpu train.py", "tee is '7'"),
    (f"{TWO} --log_dir plain.txt/a train.py", f"log_dir is 'plain.txt/a', {UNUSABLE}: Not a directory. {ANOTHER}"),
    (f"{TWO} --save_on_signal plain.txt train.py", f"save_on_signal is 'plain.txt', {UNUSABLE}: File exists."),
    ("launch --log_dir /proc --cpu --num_processes 2 train.py", "log_dir is '/proc'"),
    ("config show --config_file folder", "The configuration file folder is not a file"),
    ("config default --config_file plain.txt/a.yaml", "plain.txt/a.yaml can't be written"),
    *((f"{PLAN} --{row}", "--{} is '{}'".format(*row.split())) for row in TOO_LARGE),
    ("checkpoint ls broken", "broken/model.safetensors can't be read"),
    # outer loops
    ("launch --cpu --outer auto --outer-every 4 train.py", "every is for auto to choose. Leave it out"),
    ("launch --cpu --outer hierarchical --outer-levels nonsense train.py", "'nonsense'"),
    # how ranks share models
    ("launch --cpu --num_processes 4 --fsdp_version 2 train.py", "--fsdp_version is read only with --use_fsdp"),
    ("launch --cpu --use_fsdp --fsdp_sharding_strategy NO_SHARD train.py", "DDP replicates models"),
    (f"{GRID}_cp_size 2 train.py", "cp_size (2) is 2, but there is 1"),
    ("launch --use_parallelism_config --parallelism_config_sp_size 2 train.py", "sequence parallelism"),
    ("launch --use_parallelism_config --parallelism_config_cp_backend ring train.py", "torch"),
    (f"{GRID_4}_dp_shard_size 3 train.py", "(1) times parallelism_config_dp_shard_size (3) is 3,", "are 4 processes"),
    (f"{GRID}_dp_shard_size 2 train.py", "is 2, but there is 1 process"),
    (f"{GRID_4}_dp_replicate_size 4 --use_fsdp train.py", "FSDP has nothing to shard over"),
    ("launch --cpu --num_processes 4 --island_size 2 train.py", "there is no --outer"),
    ("launch --cpu --num_processes 4 --outer diloco --island_size 3 train.py", "island_size is 3, but there are 4"),
    ("launch --cpu --num_processes 4 --outer diloco --island_size 4 train.py", "a smaller divisor"),
    ("launch --cpu --num_processes 4 --outer diloco --island_size host train.py", "there is one machine"),
    ("launch --cpu --num_processes 4 --outer diloco --island_size two train.py", "island_size is 'two'"),
    ("launch --cpu --num_processes 4 --use_fsdp --island_size 2 train.py", "parallelism_config_dp_shard_size to"),
    ("launch --tpu train.py", "--tpu asks for TPUs"),
    ("launch --nnodes 2 train.py", "Use --num_machines"),
    ("launch --megatron_lm_tp_degree 2 train.py", "Megatron-LM"),
    ("launch --config_file pipe train.py", "pipe"),
    ("launch --config_file broken.yaml train.py", "broken.yaml:2"),
    ("launch --config_file broken.json train.py", "broken.json:1"),
    ("launch --config_file list.yaml train.py", "list.yaml:1"),
    ("launch --config_file deepspeed.yaml train.py", "DEEPSPEED"),
    ("launch --config_file zero.yaml train.py", "`deepspeed_config` asks for DeepSpeed"),
    ("launch --config_file outer.yaml train.py", "outer.yaml:1"),
    ("launch --config_file slip.yaml train.py", "`outer_evry`. Did you mean `outer_every`?"),
    ("config --config_file x.yaml show", "--config_file must come after `show`"),
    ("env extra", "extra"),
    (f"{PLAN} --replicas 0", "'--replicas': 0"),
    (f"{PLAN} --bucket 25", "--bucket is '25'"),
    ("checkpoint ls plain.txt", "'plain.txt'"),
    ("checkpoint verify folder", "folder"),
    ("checkpoint diff folder", "Missing argument 'OTHER'"),
    ("demo --processes 100000000", "--processes asks for 100000000 processes"),
    ("demo --data nowhere", "nowhere"),
    ("demo --output plain.txt --steps 1", "plain.txt", "can't be written to"),
    ("demo --generate x --output nowhere", "nowhere", "Run `farflung demo` first"),
    ("demo --bandwidth 20", "--bandwidth is '20'"),
    # slips, with the word that is wrong and what was meant
    ("lunch", "'lunch'", "Did you mean `launch`"),
    ("key --hlp", "--hlp", "Did you mean --help"),
    ("--hlep", "'--hlep'", "Did you mean --help"),
    ("launch --num-proceses 2 train.py", "--num_proceses", "Did you mean --num_processes"),
    ("launch --config train.yaml train.py", "--config", "Did you mean --config_file"),
    ("launch --help elastc", "'elastc'", "Did you mean `elastic`"),
    ("launch --help=procesess", "'procesess'", "Did you mean `processes`"),
    ("launch --cpu folder/tran.py", "'folder/tran.py'", "Did you mean `folder/train.py`"),
    ("launch --mixed_precision bf61 train.py", "'bf61'", "Did you mean `bf16`"),
    ("launch --outer dilco train.py", "'dilco'", "Did you mean `diloco`"),
    ("launch --dynamo_backend inductr train.py", "'inductr'", "Did you mean `inductor`"),
    ("launch --outer diloco --outer-every 2 --outer-codec int5 train.py", "'int5'", "Did you mean `int8`"),
    ("launch --config_file misspelt.yaml train.py", "`mixed_percision`", "Did you mean `mixed_precision`"),
    *((f"{line} --config_file gone.yaml", "gone.yaml", "`farflung config` writes one") for line in ("env", "test")),
    ("launch --config_file gone.yaml train.py", "gone.yaml", "`farflung config` writes one"),
    ("launch --only_rank x train.py", "'x'", "use ranks separated by commas, such as 0 or 0,3"),
    (f"{TWO} --only-rank 2 train.py", "only_rank names rank 2, but ranks of 2 processes are counted from 0."),
    ("launch --elastic 2:4 --only-rank 0 train.py", "--only_rank and --elastic", "accelerator.print"),
    ("launch --elastic two train.py", "'two'", "such as 2:8"),
    ("launch --elastic 4:2 train.py", "'4:2'", "more than the most, 2"),
    ("launch --elastic 2:4 --replicas 9 train.py", "--replicas is 9", "at most 4"),
    ("launch --key_file x.key train.py", "key_file is x.key", "--elastic nor --join"),
    ("launch --join nowhere train.py", "'nowhere'", "use host:port"),
    ("launch --elastic 1:2 --meet ftp://x train.py", "'ftp://x'", "use file:///shared/run7"),
    ("launch --elastic 1:2 --num_processes 2 train.py", "--num_processes and --elastic", "Use --ranks_per_replica"),
    ("launch --meet file:///x train.py", "--meet", "needs --elastic"),
    ("launch --standalone train.py", "--standalone", "Use --main_process_ip"),
    ("launch --engine slrm train.py", "'slrm'", "Did you mean `slurm`"),
    ("launch --engine ssh train.py", "no hosts", "Add --hosts a,b"),
    ("launch --engine slurm --hosts a,b train.py", "--hosts", "is for --engine ssh"),
    ("launch --sync train.py", "--sync", "Add --hosts a,b"),
    ("launch --engine_options partition=x train.py", "'partition=x'", "Add --engine slurm"),
    ("launch --hosts a,b --only-rank 0 train.py", "--only_rank", "a run on this machine"),
    ("launch --hosts a,b --run-dir none train.py", "keeps in the run's folder what it has submitted."),
    *((line, "gone", "is no folder of a run") for line in ("follow gone", "scale gone 2", "cancel gone")),
    ("scale gone two", "'two'", "not a valid integer"),
    ("config shw", "'shw'", "Did you mean `show`"),
    ("config show --orign", "'--orign'", "Did you mean --origin"),
    ("env --config_fil x", "--config_fil", "Did you mean --config_file"),
    ("plan --paramters 1M", "--paramters", "Did you mean --parameters"),
    ("plan --parameters 1Q --steps 1k --step_seconds 1 --bandwidth 1Gbit", "'1Q'", "such as 350000, 124M or 1.1B"),
    ("checkpoint verfy .", "'verfy'", "Did you mean `verify`"),
    ("checkpoint ls gone", "'gone'", "does not exist"),
    ("checkpoint convert . out --to farflng", "'farflng'", "is not one of 'accelerate', 'farflung', 'state-dict'"),
    ("checkpoint convert . out --too farflung", "'--too'", "Did you mean --to"),
    ("checkpoint pull nowhere out", "nowhere", "such as file:///path or s3://bucket/run"),
    ("estimate bert --dtypes flot32", "'flot32'", "choose from"),
    ("estimate bert --dtyps=float32", "--dtyps", "Did you mean `--dtypes`"),
    ("test --config gone.yaml", "--config", "Did you mean `--config_file`"),
    ("test extra", "extra", "Unexpected arguments"),
    ("to-fsdp2", "--config_file", "required"),
    ("to-fsdp2 --config_file gone.yaml --overwrite", "gone.yaml", "does not exist"),
    ("to-fsdp2 --config_file broken.yaml --overwrite", "broken.yaml", "is not YAML"),
    ("to-fsdp2 --config_file misspelt.yaml --overwite", "--overwite", "Did you mean `--overwrite`"),
    ("demo --size tinny", "'tinny'", "is not one of 'tiny', 'small', 'medium', 'large'"),
    ("demo --processes 0", "0", "x>=2"),
    *(
        (f"{words} gone", "gone", "`farflung launch` makes one for each run")
        for words in ("watch", "report", "plan --from")
    ),
    ("report --out picture.doc", "no run", "farflung launch"),
    ("doctor --meet ftp://x", "'ftp://x'", "use file:///shared/run7"),
    ("tpu-config x", "`farflung tpu-config`", "Use torch_xla's own launcher"),
    # recipes of the outer loop
    ("launch --cpu --num_processes 2 --outer quadratic --outer-every 4 train.py", "quadratic needs alpha"),
    (f"{TWO} --outer slowmo --outer-every 4 --outer-seconds 2 train.py", "slowmo has no option seconds; it takes"),
    (f"{DILOCO} --outer-every 0 train.py", "--outer_every is 0; it must be a whole number"),
    (f"{DILOCO} --outer-steps 20 train.py", "--outer_steps is 20, and the first round comes after 32"),
    (f"{DILOCO} --outer-robust trimmed train.py", "needs 4 replicas, so that the others outvote any one of them"),
    ("launch --elastic 1:3 --outer diloco --outer-robust trimmed train.py", "needs 4 replicas", "3"),
    ("launch --elastic 4:8 --outer hierarchical --outer-levels 4:2,64:all train.py", "hierarchical averages blocks"),
    ("launch --dry-run --elastic 1:3 --outer diloco --outer-robust trimmed train.py", "needs 4 replicas", "3"),
    ("launch --elastic 1:3 --outer post_local_sgd --outer-warmup 4 train.py", "warmup is 4: DDP would average"),
    (f"{AVERAGED} --outer-robust clip train.py", "--outer_robust is 'clip', but weights that are averaged have"),
    # settings that exclude each other
    ("launch --elastic 1:2 --replicas 0 train.py", "1 or more"),
    ("launch --elastic 1:2 --grace_s 0 train.py", "above 0"),
    ("launch --cpu --grace_s 5 train.py", "grace_s is 5, which needs --elastic"),
    ("launch --join a:1 --grace_s 5 train.py", "grace_s is 5, which needs --elastic"),
    ("launch --elastic 1:2 --join a:1 train.py", "has its bounds already"),
    ("launch --elastic 1:2 --save_on_signal saved train.py", "Replicas sign out on SIGTERM and SIGUSR1"),
    ("launch --join a:1 --save_on_signal saved train.py", "--save_on_signal and --join are both given"),
    ("launch --elastic 1:2 --num_machines 2 --main_process_ip a train.py", "use --join host:port"),
    ("launch --meet file:///run --join a:1 train.py", "needs --elastic and excludes --join"),
    ("launch --meet tcp://host --elastic 1:2 train.py", "or tcp://host:port"),
    ("launch --meet file://run --elastic 1:2 train.py", "'file://run'; use file:///shared/run7 with the whole path"),
    (f"{FOLDER} --heartbeat_s 0 train.py", "heartbeat_s is 0.0; it must be a finite number above 0"),
    ("launch --elastic 1:2 --heartbeat_s 1 train.py", "heartbeat_s is 1, which needs --meet"),
    (f"{FOLDER} --state_every 1 train.py", "state_every is 1; it must be a whole number", "2 or more"),
    ("launch --elastic 1:2 --state_every 4 train.py", "state_every is 4, which needs --meet in a folder or a bucket"),
    ("launch --elastic 1:2 --meet tcp://a:1 --state_every 4 train.py", "which needs --meet in a folder or a bucket"),
    (f"{FOLDER} --main_process_port 29500 train.py", "excludes main_process_ip and"),
]
# What stands behind `farflung launch --cpu`, before the folder of the run and the script.
OF_ENGINES = [
    # engines: ssh
    ("--hosts a,,b", "hosts holds ''", "a name that ssh knows"),
    ("--hosts -oProxyCommand=x,b", "'-oProxyCommand=x'", "a name that ssh knows"),
    ("--hosts a:0", "'a:0'", "node1:2"),
    ("--hosts a:2,me@a", "names a twice", "use a:2"),
    ("--hosts gone.txt", "'gone.txt'", "no such file"),
    ("--hosts empty.hosts", "'empty.hosts', which names no machine", "one a line"),
    ("--hosts a:2,b:4", "hosts asks for a:2, b:4, but each machine of a fixed run has as many", "hosts may differ"),
    ("--hosts a,b --num_processes 3", "num_processes is 3, but hosts names 2; use a multiple of 2."),
    ("--hosts a:2,b:2 --num_processes 8", "num_processes is 8, but hosts asks for a:2, b:2, which makes 4. Leave"),
    ("--hosts a,b --num_machines 3 --main_process_ip a", "num_machines is 3 and machine_rank 0, but hosts names 2 in"),
    ("--hosts a:4,b:4 --elastic 1:4", "8 replicas are to start, but elastic is 1:4, and each host has at least"),
    ("--hosts a,b:1 --elastic 3:4", "2 replicas are to start, but elastic is 3:4,", "one: hosts asks for a:1, b:1."),
    ("--hosts a,b --log_dir logs", "engine is ssh", "log_dir is for a run on this machine"),
    # Slurm
    ("--engine slurm --engine-options cpu", "begins with 'cpu'; use key=value"),
    ("--engine slurm --engine-options signal=soon", "signal=soon; use a whole number"),
    ("--engine slurm --engine-options signal=60", "only a run with --save_on_signal or --elastic"),
    (f"{SLURM} --num_machines 2 --machine_rank 1", "machine_rank is 1, but Slurm chooses the nodes", "Leave it out"),
    (f"{SLURM} --elastic 2:4 --main_process_ip node0", "main_process_ip is node0", "--meet says where replicas meet"),
    (f"{SLURM} --state_every 4", "state_every is 4, which needs --meet in a folder or a bucket"),
    ("--engine slurm --run-dir a%j", "takes % in names of output files for patterns of its own. Name a folder without"),
    # Ray
    ("--engine ray --engine-options cpus=two", "cpus=two; use a whole number"),
    ("--engine ray --engine-options cpus=0", "cpus=0; a launcher needs at least one"),
    ("--engine ray --engine-options address=ray://h:10001", "address is ray://h:10001, which is for Ray's client"),
    ("--engine ray --sync", "sync is for --engine ssh, but engine is ray"),
    ("--engine ray --num_machines 2 --machine_rank 1", "machine_rank is 1, but Ray decides"),
    ("--engine ray --num_machines 2 --main_process_ip 10.0.0.1", "main_process_ip is 10.0.0.1, but Ray decides"),
    # Kubernetes
    ("--engine kubernetes", "no image is named. Add --engine_options image="),
    ("--engine kubernetes --engine-options image=a,gpus=two", "gpus=two; use a whole number"),
    ("--engine kubernetes --engine-options image=a,node_selector=a100", "node_selector=a100; use key=value"),
    (f"{IMAGE} --num_machines 2 --machine_rank 1", "machine_rank is 1, but Kubernetes"),
    (f"{IMAGE} --num_machines 2 --main_process_ip 10.0.0.1", "main_process_ip is 10.0.0.1"),
    ("--engine kubernetes --engine-options image=a --elastic 1:2", "meet is None, but pods come and go"),
    (f"{IMAGE} --elastic 1:2 --meet tcp://a:1", "meet is tcp://a:1, but pods come and go"),
    (f"{IMAGE} --elastic 1:2 --meet file:///workspace/r", "Mount a claim at /workspace"),
    (f"{IMAGE},claim=b --elastic 1:2 --meet file:///tmp/r", "file:///tmp/r, a folder that pods"),
]

# Of these commands a parser of Python's answers, with the usage before.
PARSED = ("estimate", "test", "to-fsdp2")


@pytest.fixture
def answer(home, monkeypatch, capsys):
    """Call the command in the empty home, with some files, on a machine of two cores and no GPU; nothing starts."""
    for name in ("folder", "broken"):
        (home / name).mkdir()
    for name, text in FILES.items():
        (home / name).write_text(text)
    (home / "broken" / "model.safetensors").symlink_to("nowhere")
    os.mkfifo(home / "pipe")
    before = set(home.rglob("*"))

    def started(*_):
        raise AssertionError("processes were started")

    for module, name in ((run, "become"), (run, "start"), (demo, "start")):
        monkeypatch.setattr(module, name, started)
    monkeypatch.setattr(plan, "usable_cores", lambda: 2)
    monkeypatch.setattr(plan, "count_gpus", lambda: 0)

    def call(line: str) -> list[str]:
        with pytest.raises(SystemExit) as ended:
            command.main(shlex.split(line))
        printed = capsys.readouterr()
        assert ended.value.code == 2
        # They say first what is about to be done, or what is known without the settings.
        assert line.startswith(("demo --output", "env --config_file")) or printed.out == ""
        assert set(home.rglob("*")) == before
        assert len(printed.err.splitlines()) <= 15 or not line  # without a command, the help
        return [text for text in printed.err.splitlines() if text.strip() and not text.startswith(("Usage: ", "Try "))]

    return call


@pytest.mark.parametrize(("line", "words"), [pytest.param(line, words, id=line) for line, *words in WRONG])
def test_a_wrong_use_is_answered_by_one_sentence(line, words, answer):
    said = answer(line)
    if line and line.split()[0] not in PARSED:
        assert len(said) == 1, said
        assert said[0].startswith(("Error: ", "ConfigError: ", "Unsupported: ", "CheckpointError: "))
    assert [word for word in words if word not in "\n".join(said)] == [], said


@pytest.mark.parametrize(("flags", "words"), [pytest.param(flags, words, id=flags) for flags, *words in OF_ENGINES])
def test_a_wrong_use_of_an_engine_is_answered_before_anything_connects(flags, words, answer):
    run_dir = "" if "--run-dir" in flags else "--run-dir run"
    (said,) = answer(f"launch --cpu {flags} {run_dir} train.py")
    assert [word for word in words if word not in said] == [], said


def test_the_table_has_each_command_and_each_line_once():
    assert len({line for line, *_ in WRONG}) == len(WRONG)
    assert {line.split()[0] for line, *_ in WRONG if line} >= {*command.COMMANDS}


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("FARFLUNG_NUM_PROCESSES", "many", "FARFLUNG_NUM_PROCESSES is 'many'"),
        ("ACCELERATE_MIXED_PRECISION", "fp9", "ACCELERATE_MIXED_PRECISION is 'fp9'"),
        ("FARFLUNG_CONFIG_FILE", "nowhere.yaml", "nowhere.yaml"),
        ("FARFLUNG_GPU_IDS", "0,1", "torch finds none on this machine"),
    ],
)
def test_a_wrong_variable_is_answered_by_one_sentence(variable, value, words, answer):
    environ.export({variable: value})
    (said,) = answer("launch train.py")
    assert words in said
