# SPDX-License-Identifier: Apache-2.0
"""Slips in a command line, of every command: code 2, few lines, the word that is wrong, and what was meant."""

from __future__ import annotations

import shlex

import pytest

from farflung.launch import main as command

# What stands behind `farflung`, the word that is wrong, and what the answer suggests.
SLIPS = [
    ("lunch", "'lunch'", "Did you mean `launch`"),
    ("lanch train.py", "'lanch'", "Did you mean `launch`"),
    ("chekpoint ls", "'chekpoint'", "Did you mean `checkpoint`"),
    ("estimat x", "'estimat'", "Did you mean `estimate`"),
    ("confg", "'confg'", "Did you mean `config`"),
    ("key --hlp", "--hlp", "Did you mean --help"),
    ("--hlep", "'--hlep'", "Did you mean --help"),
    ("--verson", "'--verson'", "Did you mean --version"),
    ("launch --num-proceses 2 train.py", "--num_proceses", "Did you mean --num_processes"),
    ("launch --mixd_precision bf16 train.py", "--mixd_precision", "Did you mean --mixed_precision"),
    ("launch --outter diloco train.py", "--outter", "Did you mean --outer"),
    ("launch --eastic 2:4 train.py", "--eastic", "Did you mean --elastic"),
    ("launch --config train.yaml train.py", "--config", "Did you mean --config_file"),
    ("launch --only-rnk 0 train.py", "--only_rnk", "Did you mean --only_rank"),
    ("launch --jsn train.py", "--jsn", "Did you mean --json"),
    ("launch --dry-rn train.py", "--dry_rn", "Did you mean --dry_run"),
    ("launch --help elastc", "'elastc'", "Did you mean `elastic`"),
    ("launch --help=procesess", "'procesess'", "Did you mean `processes`"),
    ("launch --cpu tran.py", "'tran.py'", "Did you mean `train.py`"),
    ("launch --cpu folder/tran.py", "'folder/tran.py'", "Did you mean `folder/train.py`"),
    ("launch --mixed_precision bf61 train.py", "'bf61'", "Did you mean `bf16`"),
    ("launch --outer dilco train.py", "'dilco'", "Did you mean `diloco`"),
    ("launch --dynamo_backend inductr train.py", "'inductr'", "Did you mean `inductor`"),
    ("launch --outer diloco --outer-every 2 --outer-codec int5 train.py", "'int5'", "Did you mean `int8`"),
    ("launch --config_file slip.yaml train.py", "`mixed_percision`", "Did you mean `mixed_precision`"),
    ("launch --config_file gone.yaml train.py", "gone.yaml", "`farflung config` writes one"),
    ("launch --only_rank x train.py", "'x'", "use ranks separated by commas, such as 0 or 0,3"),
    ("launch --only-rank 0,a train.py", "'0,a'", "such as 0 or 0,3"),
    ("launch --cpu --num_processes 2 --only-rank 2 train.py", "rank 2", "counted from 0"),
    ("launch --elastic 2:4 --only-rank 0 train.py", "--only_rank and --elastic", "accelerator.print"),
    ("launch --elastic two train.py", "'two'", "such as 2:8"),
    ("launch --elastic 4:2 train.py", "'4:2'", "more than the most, 2"),
    ("launch --elastic 2:4 --replicas 9 train.py", "--replicas is 9", "at most 4"),
    ("launch --replicas 2 train.py", "--replicas is 2", "--elastic nor --join"),
    ("launch --join nowhere train.py", "'nowhere'", "use host:port"),
    ("launch --elastic 1:2 --meet ftp://x train.py", "'ftp://x'", "use file:///shared/run7"),
    ("launch --elastic 1:2 --grace_s soon train.py", "'soon'", "must be a number"),
    ("launch --elastic 1:2 --num_processes 2 train.py", "--num_processes and --elastic", "Use --ranks_per_replica"),
    ("launch --meet file:///x train.py", "--meet", "needs --elastic"),
    ("launch --cpu --num_processes two train.py", "'two'", "must be an integer"),
    ("launch --outer diloco --outer-every x train.py", "'x'", "must be an integer"),
    ("launch --rdzv_backend ectd train.py", "'ectd'", "use one of static, c10d"),
    ("launch --nproc_per_node 2 train.py", "--nproc_per_node", "Use --num_processes"),
    ("launch --local_ranks_filter 0 train.py", "--local_ranks_filter", "Use --only_rank"),
    ("launch --standalone train.py", "--standalone", "Use --main_process_ip"),
    ("launch --use_deepspeed train.py", "--use_deepspeed", "Leave it out to train with DDP"),
    ("launch --cpu --gpu_ids 0 train.py", "'0'", "choose one"),
    ("launch --engine slrm train.py", "'slrm'", "Did you mean `slurm`"),
    ("launch --engine ssh train.py", "no hosts", "Add --hosts a,b"),
    ("launch --engine slurm --hosts a,b train.py", "--hosts", "is for --engine ssh"),
    ("launch --sync train.py", "--sync", "Add --hosts a,b"),
    ("launch --engine_options partition=x train.py", "'partition=x'", "Add --engine slurm"),
    ("launch --hosts a,b --only-rank 0 train.py", "--only_rank", "a run on this machine"),
    ("launch --hosts a,b --run-dir none train.py", "run_dir is none", "keeps in the run's folder"),
    ("follow gone", "gone", "is no folder of a run"),
    ("scale gone 2", "gone", "is no folder of a run"),
    ("scale gone two", "'two'", "not a valid integer"),
    ("cancel gone", "gone", "is no folder of a run"),
    ("config shw", "'shw'", "Did you mean `show`"),
    ("config defalt", "'defalt'", "Did you mean `default`"),
    ("config show --orign", "'--orign'", "Did you mean --origin"),
    ("config show --num_processes two", "'two'", "must be an integer"),
    ("config default --mixed_precision bf17", "'bf17'", "Did you mean `bf16`"),
    ("config default --mixed_precison bf16", "--mixed_precison", "Did you mean --mixed_precision"),
    ("config --config_fil x", "--config_fil", "Did you mean --config_file"),
    ("env --config_fil x", "--config_fil", "Did you mean --config_file"),
    ("env --config_file gone.yaml", "gone.yaml", "`farflung config` writes one"),
    ("plan --paramters 1M", "--paramters", "Did you mean --parameters"),
    ("plan --parameters 1Q --steps 1k --step_seconds 1 --bandwidth 1Gbit", "'1Q'", "such as 350000, 124M or 1.1B"),
    ("plan --parameters 1M --steps 1k --step_seconds 1 --bandwidth fast", "'fast'", "such as 100Mbit"),
    ("checkpoint l", "'l'", "Did you mean `ls`"),
    ("checkpoint verfy .", "'verfy'", "Did you mean `verify`"),
    ("checkpoint ls gone", "'gone'", "does not exist"),
    ("checkpoint convert . out --to farflng", "'farflng'", "is not one of 'accelerate', 'farflung', 'state-dict'"),
    ("checkpoint convert . out --too farflung", "'--too'", "Did you mean --to"),
    ("checkpoint diff . gone", "'gone'", "does not exist"),
    ("checkpoint pull nowhere out", "nowhere", "such as file:///path or s3://bucket/run"),
    ("checkpoint pull", "'ADDRESS'", "Missing argument"),
    ("estimate", "model_name", "required"),
    ("estimate bert --dtypes flot32", "'flot32'", "choose from"),
    ("estimate bert --dtyps float32", "--dtyps", "Did you mean `--dtypes`"),
    ("test --config_fil x", "--config_fil", "Did you mean `--config_file`"),
    ("test --config_file gone.yaml", "gone.yaml", "`farflung config` writes one"),
    ("test extra", "extra", "Unexpected arguments"),
    ("to-fsdp2", "--config_file", "required"),
    ("to-fsdp2 --config_file gone.yaml --overwrite", "gone.yaml", "does not exist"),
    ("to-fsdp2 --config_file broken.yaml --overwrite", "broken.yaml", "is not YAML"),
    ("to-fsdp2 --config_file slip.yaml --overwite", "--overwite", "Did you mean `--overwrite`"),
    ("demo --stps 3", "'--stps'", "Did you mean --steps"),
    ("demo --steps x", "'x'", "--steps"),
    ("demo --size tinny", "'tinny'", "is not one of 'tiny', 'small', 'medium', 'large'"),
    ("demo --processes 0", "0", "x>=2"),
    ("watch gone", "gone", "`farflung launch` makes one for each run"),
    ("watch --onse", "'--onse'", "Did you mean --once"),
    ("report gone", "gone", "`farflung launch` makes one for each run"),
    ("report --out picture.doc", "no run", "farflung launch"),
    ("plan --from gone", "gone", "`farflung launch` makes one for each run"),
    ("doctor --timeot 5", "--timeot", "Did you mean --timeout"),
    ("doctor --timeout -1", "-1", "more than 0"),
    ("doctor --parameters many", "'many'", "such as 350000, 124M or 1.1B"),
    ("doctor --meet ftp://x", "'ftp://x'", "use file:///shared/run7"),
    ("launch --run-dr x train.py", "--run_dr", "Did you mean --run_dir"),
    ("tpu-config x", "`farflung tpu-config`", "Use torch_xla's own launcher"),
]


@pytest.fixture
def files(home):
    (home / "folder").mkdir()
    for name in ("train.py", "folder/train.py"):
        (home / name).touch()
    (home / "slip.yaml").write_text("mixed_percision: bf16\n")
    (home / "broken.yaml").write_text("num_processes: [1\n")


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(("line", "wrong", "meant"), SLIPS, ids=[line for line, *_ in SLIPS])
def test_a_slip_is_answered_with_the_wrong_word_and_what_was_meant(line, wrong, meant, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(shlex.split(line))
    printed = capsys.readouterr()
    assert (ended.value.code, printed.out) == (2, "")
    assert len(printed.err.splitlines()) <= 15
    assert wrong in printed.err
    assert meant in printed.err


def test_every_command_has_slips_in_the_table():
    assert len({line for line, *_ in SLIPS}) == len(SLIPS) >= 60
    assert {line.split()[0] for line, *_ in SLIPS} >= {*command.COMMANDS}
    suggested = [line for line, _, meant in SLIPS if meant.startswith(("Did you mean", "Use ", "use ", "such as"))]
    assert len(suggested) > 45
