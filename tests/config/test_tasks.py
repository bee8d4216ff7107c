# SPDX-License-Identifier: Apache-2.0
"""A launcher that srun, mpirun or a cluster starts as one of several finds its place by their variables, or stops."""

import socket

import pytest

from farflung.base.errors import ConfigError
from farflung.config import environ
from farflung.config.resolve import resolve
from farflung.config.tasks import read_task

SLURM = {"SLURM_NTASKS": "4", "SLURM_PROCID": "1", "SLURM_NODEID": "1", "SLURM_LOCALID": "0"}
SLURM |= {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "4", "SLURM_STEP_NODELIST": "node[007-009,12]"}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1", "MASTER_ADDR": "10.0.0.1"}
OPEN_MPI |= {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
PMI = {"PMI_SIZE": "4", "PMI_RANK": "1", "MPI_LOCALNRANKS": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "7000"}
PET = {"PET_NNODES": "4", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "head", "PET_MASTER_PORT": "7000"}
ENDPOINT = {"PET_NNODES": "4", "PET_NODE_RANK": "1", "PET_RDZV_ENDPOINT": "[fe00::1]:7000"}
SKY = {"SKYPILOT_NUM_NODES": "4", "SKYPILOT_NODE_RANK": "1"}
SKY |= {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n10.0.0.3\n10.0.0.4"}
DSTACK = {"DSTACK_NODES_NUM": "4", "DSTACK_NODE_RANK": "1", "DSTACK_MASTER_NODE_IP": "10.0.0.1"}
RANKED = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "p0", "MASTER_PORT": "23456"}  # Kubeflow's PyTorchJob
NO_HOST = OPEN_MPI | {"MASTER_ADDR": ""}
# mpirun's helpers are tasks too, on all hosts but its own.
UNDER_SLURM = NO_HOST | SLURM | {"SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "0"}
UNDER_SLURM |= {"SLURM_STEP_NODELIST": "node[008-009,12]", "SLURM_JOB_NODELIST": "node[007-009,12]"}
MPI_OF_SRUN = SLURM | {"PMI_SIZE": "4", "PMI_RANK": "1"}  # --mpi=pmi2
JSRUN = OPEN_MPI | {"JSM_NAMESPACE_SIZE": "4", "JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_LOCAL_SIZE": "1"}


def place(**flags):
    settings = resolve(flags).settings
    return settings.num_machines, settings.machine_rank, settings.main_process_ip, settings.main_process_port


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (SLURM, (4, 1, "node007", None)),
        (SLURM | {"MASTER_ADDR": "head", "MASTER_PORT": "7000"}, (4, 1, "head", 7000)),
        (SLURM | {"SLURM_JOB_ID": "2501", "SLURM_STEP_ID": "3"}, (4, 1, "node007", 10_011)),
        (OPEN_MPI, (4, 1, "10.0.0.1", None)),
        (UNDER_SLURM, (4, 1, "node007", None)),
        (PMI, (4, 1, "10.0.0.1", 7000)),
        (PET, (4, 1, "head", 7000)),
        (ENDPOINT, (4, 1, "fe00::1", 7000)),
        (SKY, (4, 1, "10.0.0.1", None)),
        (DSTACK, (4, 1, "10.0.0.1", None)),
        (MPI_OF_SRUN, (4, 1, "node007", None)),
        (JSRUN, (4, 1, "10.0.0.1", None)),
    ],
)
@pytest.mark.parametrize("in_file", ["", "num_machines: 1\nmachine_rank: 0\n", "num_machines: 8\nmachine_rank: 3\n"])
def test_the_place_among_the_tasks_counts_before_a_file(variables, expected, in_file, home):
    (home / "farflung.yaml").write_text(f"num_processes: 8\nmain_process_ip: other\n{in_file}")
    with environ.patched(variables):
        assert place() == expected
        resolved = resolve({})
        assert resolved.settings.num_local == 2
        (note,) = resolved.notes
        assert note.startswith("one of 4 tasks (")
        by = "SLURM_PROCID" if variables is MPI_OF_SRUN else next(name for name in RANKS.split() if name in variables)
        assert f"machine_rank 1 ({by})" in note
        assert f"main_process_ip {expected[2]} (" in note


RANKS = """
JSM_NAMESPACE_RANK SKYPILOT_NODE_RANK DSTACK_NODE_RANK OMPI_COMM_WORLD_RANK PMI_RANK SLURM_PROCID PET_NODE_RANK
"""


HERE = socket.gethostname()
HOSTS = {"one": "one", "a,b[1-2]": "a", "gpu[007-010,12]-ib,login2": "gpu007-ib", "r[1,3-4]n[02-08]": "r1n02"}
HOSTS |= {"n1.cluster.org,n2": "n1.cluster.org", "rack[3-4]node[1-2]": "rack3node1", "a[001-100],b7": "a001"}


@pytest.mark.parametrize("listed", HOSTS)
def test_the_first_host_of_a_list_is_found(listed, home):
    with environ.patched(SLURM | {"SLURM_STEP_NODELIST": listed}):
        assert read_task().host.value == HOSTS[listed]


@pytest.mark.parametrize(
    ("batch_script", "task", "sign"),
    [
        ({"PBS_NODENUM": "0", "PBS_TASKNUM": "1"}, {"PBS_NODENUM": "0", "PBS_TASKNUM": "2"}, "PBS_TASKNUM ('2')"),
        ({"PBS_NODENUM": "0"}, {"PBS_NODENUM": "1", "PBS_TASKNUM": "1"}, "PBS_NODENUM ('1')"),
        ({"LSB_MCPU_HOSTS": f"{HERE} 2 other 2"}, {"LSB_MCPU_HOSTS": f"other 2 {HERE}.cluster 2"}, "LSB_MCPU_HOSTS"),
    ],
)
def test_a_task_of_pbsdsh_or_blaunch_does_not_train_alone(batch_script, task, sign, home):
    with environ.patched(batch_script):
        assert place() == (1, 0, None, None)
    with environ.patched(task):
        with pytest.raises(ConfigError) as raised:
            place()
        assert sign in str(raised.value)
        assert "--machine_rank" in str(raised.value)
        assert place(num_machines="1") == (1, 0, None, None)


def test_what_torchrun_would_read_counts_before_other_starters_and_a_file(home):
    with environ.patched(SLURM | OPEN_MPI | PET | {"PET_NNODES": "2", "PET_NODE_RANK": "0"}):
        assert place() == (2, 0, "head", 7000)
    (home / "farflung.yaml").write_text("num_processes: 1\n")
    with environ.patched({"PET_NPROC_PER_NODE": "2"}):
        resolved = resolve({})
        assert ("num_processes", "2", "environment PET_NPROC_PER_NODE") in resolved.rows()
        assert resolve({"num_processes": "1"}).settings.num_processes == 1
        (home / "empty.yaml").touch()
        assert resolve({"elastic": "2:4", "num_machines": "1", "config_file": f"{home}/empty.yaml"}).settings.elastic
        (home / "farflung.yaml").write_text("num_processes: 4\n")
        with environ.patched(PET):
            settings = resolve({}).settings
            assert (settings.num_processes, settings.num_local) == (8, 2)
    with environ.patched({"PET_NPROC_PER_NODE": "auto"}):
        assert resolve({}).settings.num_processes == 4


@pytest.mark.parametrize(
    ("variables", "flags", "in_file", "message"),
    [
        ({}, {"num_processes": "4"}, "", "--num_processes is 4, but PET_NPROC_PER_NODE is 2, which makes a world of 2"),
        ({"FARFLUNG_NUM_PROCESSES": "4"}, {}, "", "FARFLUNG_NUM_PROCESSES is 4, but PET_NPROC_PER_NODE is 2"),
        ({}, {}, "num_processes: 4", "farflung.yaml:1: num_processes is 4, but PET_NPROC_PER_NODE is 2"),
        (PET, {"num_processes": "16"}, "", "which makes a world of 8 on 4 machines"),
    ],
)
def test_a_world_smaller_than_what_was_asked_for_is_an_error_with_its_cause(variables, flags, in_file, message, home):
    (home / "farflung.yaml").write_text(in_file)
    with environ.patched({"PET_NPROC_PER_NODE": "2", **variables}):
        with pytest.raises(ConfigError) as raised:
            resolve(flags)
        assert message in str(raised.value)
        assert "--num_machines 1" in str(raised.value)
        alone = resolve({**flags, "num_machines": "1"}).settings
    assert alone.num_processes in (4, 16)


def test_what_is_given_by_hand_stays(home):
    with environ.patched(RANKED):
        assert place(num_machines="1") == (1, 0, None, None)
        assert place(num_machines="2", machine_rank="1", main_process_ip="head") == (2, 1, "head", None)
    with environ.patched(SLURM):
        assert place(num_machines="1") == (1, 0, None, None)
        assert not resolve({"num_machines": "1"}).notes
        assert place(num_machines="2", machine_rank="1", main_process_ip="head") == (2, 1, "head", None)
        assert place(main_process_ip="head", main_process_port="7000") == (4, 1, "head", 7000)
        assert place(num_machines="4") == (4, 1, "node007", None)
        with environ.patched({"FARFLUNG_NUM_MACHINES": "1"}):
            assert place() == (1, 0, None, None)
    with environ.patched(NO_HOST):
        assert place(main_process_ip="head") == (4, 1, "head", None)
        (home / "farflung.yaml").write_text("main_process_ip: other\n")
        assert place() == (4, 1, "other", None)


@pytest.mark.parametrize(
    "variables",
    [
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_JOB_NODELIST": "node[1-4]"},  # the batch script
        SLURM | {"SLURM_PTY_PORT": "33333"},  # an interactive shell
        {name: "1" if value == "4" else value for name, value in SLURM.items()},
        {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
        {"PET_NNODES": "1"},
        RANKED | {"PET_NNODES": "1"},
        RANKED | {"WORLD_SIZE": "1", "RANK": "0"},
        RANKED | {"TORCHELASTIC_RUN_ID": "none"},  # started by a script that is a rank
        SLURM | {"TORCHELASTIC_RUN_ID": "farflung"},
        PET | {"PET_NPROC_PER_NODE": "8", "FARFLUNG_LAUNCHER": "17"},
        OPEN_MPI | {"FARFLUNG_REPLICA": "replica 3"},
    ],
)
def test_one_task_is_one_machine(variables, home):
    with environ.patched(variables):
        assert read_task() is None
        assert place() == (1, 0, None, None)
        assert resolve({}).settings.num_processes is None


@pytest.mark.parametrize(
    ("variables", "flags", "messages"),
    [
        (NO_HOST, {}, ["one of 4 tasks (OMPI_COMM_WORLD_SIZE)", "--main_process_ip", "MASTER_ADDR"]),
        (SLURM, {"num_processes": "6"}, ["num_processes (6)", "a multiple of 4", "--num_machines 1"]),
        (SLURM, {"num_machines": "2"}, ["num_machines is 2 (--num_machines)", "--machine_rank"]),
        (SLURM | {"SLURM_STEP_NUM_NODES": "2"}, {}, ["`srun --ntasks-per-node=1 farflung launch ...`", "_NUM_NODES"]),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, {}, ["ppr:1:node", "`python train.py`"]),
        (SLURM | {"SLURM_HET_SIZE": "2"}, {}, ["heterogeneous Slurm job (SLURM_HET_SIZE", "--machine_rank"]),
        (SKY | {"SKYPILOT_NODE_IPS": ""}, {}, ["one of 4 tasks (SKYPILOT_NUM_NODES)", "no variable tells where"]),
        (DSTACK | {"DSTACK_NODE_RANK": "4"}, {}, ["DSTACK_NODE_RANK is '4'", "--machine_rank"]),
        (SLURM | {"SLURM_STEP_NODELIST": "node[1-"}, {}, ["no variable tells where", "--main_process_ip"]),
        (PET | {"PET_NNODES": "1:4"}, {}, ["PET_NNODES is '1:4'", "--elastic"]),
        (RANKED, {}, ["RANK is 1, WORLD_SIZE is 2", "--num_machines 2 --machine_rank 1 --main_process_ip p0", "unset"]),
        (RANKED, {"elastic": "2"}, ["RANK is 1, WORLD_SIZE is 2", "--num_machines 1"]),
        (PET | {"PET_NODE_RANK": ""}, {}, ["PET_NODE_RANK is ''", "--machine_rank"]),
    ],
)
def test_what_can_not_become_one_run_is_an_error_with_what_to_do(variables, flags, messages, home):
    with environ.patched(variables), pytest.raises(ConfigError) as raised:
        resolve(flags)
    assert [message for message in messages if message not in str(raised.value)] == []


def test_elastic_tasks_are_one_run_that_the_first_one_serves(home):
    def of(variables, **flags):
        with environ.patched(variables):
            found = resolve({"elastic": "6:8"} | flags).settings
        return found.elastic, found.join, found.main_process_ip, found.main_process_port, found.replicas

    assert of(SLURM | {"SLURM_PROCID": "0"}) == ("6:8", None, "node007", 29500, 2)
    assert of(SLURM) == (None, "node007:29500", None, None, 2)
    assert of(SLURM, grace_s="9") == of(SLURM)  # which counts on the first one
    assert of(ENDPOINT | {"PET_NODE_RANK": "3"}) == (None, "[fe00::1]:7000", None, None, 1)
    assert of(SLURM, replicas="3", main_process_port="7000") == (None, "node007:7000", None, None, 3)
    assert of(SLURM | {"SLURM_STEP_NUM_NODES": "1"}) == of(SLURM)  # several launchers of replicas fit on a machine
    assert of(SLURM, num_machines="1") == ("6:8", None, None, None, None)
    with environ.patched(SLURM):
        assert resolve({"join": "node007:29500"}).settings.join == "node007:29500"
