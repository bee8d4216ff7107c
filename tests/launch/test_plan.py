# SPDX-License-Identifier: Apache-2.0
"""What this machine is to do; and all that can be known to fail is refused before a process starts."""

from __future__ import annotations

import gc
import os
import socket
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

from farflung.base.errors import ConfigError
from farflung.config import environ
from farflung.config.launch import LaunchSettings
from farflung.launch import elastic, plan as plans
from farflung.launch.events import Screen, showing
from farflung.launch.notebook import notebook_launcher
from farflung.launch.plan import lone_environment, make_plan, meet


@pytest.fixture
def script(home):
    (home / "train.py").write_text("")
    return "train.py"


MACHINES = {"num_machines": 2, "main_process_ip": "10.0.0.1"}


@pytest.mark.parametrize(
    ("said", "gpu_count", "num_local", "told_cpu"),
    [
        ({}, 0, 1, "false"),
        ({}, 4, 4, "false"),
        ({"use_cpu": True}, 4, 1, "true"),
        ({"use_cpu": True, "num_processes": 3}, 0, 3, "true"),
        ({"num_processes": 2}, 0, 2, "true"),  # Accelerate would train two unconnected copies
        ({"num_processes": 2}, 4, 2, "false"),
        ({"gpu_ids": "1,3"}, 4, 2, "false"),
        (MACHINES | {"num_processes": 8}, 4, 4, "false"),
        (MACHINES | {"machine_rank": 1}, 4, 4, "false"),
        (MACHINES | {"machine_rank": 1}, 0, 1, "true"),
        (MACHINES | {"machine_rank": 1, "outer_recipe": "diloco", "island_size": "host"}, 4, 4, "false"),
    ],
)
def test_there_is_a_process_for_each_accelerator_or_one_on_the_cpu(
    said, gpu_count, num_local, told_cpu, script, monkeypatch
):
    monkeypatch.setattr(plans, "count_gpus", lambda: gpu_count)
    plan = make_plan(LaunchSettings(**said), script, [])
    assert (plan.num_local, plan.variables["ACCELERATE_USE_CPU"]) == (num_local, told_cpu)


def test_too_few_gpus_are_explained_by_the_variable_that_hides_others(script, monkeypatch):
    monkeypatch.setattr(plans, "count_gpus", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    why = (
        r"^3 processes on this machine need a GPU each, and there are 2{}\. Use --num_processes 4, or .* with --cpu\.$"
    )
    for variables, words in ({"CUDA_VISIBLE_DEVICES": "4,5"}, r" \(CUDA_VISIBLE_DEVICES is '4,5'\)"), ({}, ""):
        with environ.patched(variables), pytest.raises(ConfigError, match=why.format(words)):
            make_plan(LaunchSettings(**MACHINES, num_processes=6), script, [])
    monkeypatch.setattr(plans, "count_gpus", lambda: 1)
    with pytest.raises(ConfigError, match="2 processes on this machine need a GPU each, and there is 1"):
        make_plan(LaunchSettings(num_processes=2), script, [])


def test_a_gpu_that_is_not_there_is_refused_by_its_number(script, monkeypatch):
    monkeypatch.setattr(plans, "count_gpus", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(ConfigError, match="gpu_ids is 1,2, but this machine has only GPUs 0 to 1"):
        make_plan(LaunchSettings(gpu_ids="1,2"), script, [])
    with environ.patched({"CUDA_VISIBLE_DEVICES": "1,2"}):
        assert make_plan(LaunchSettings(gpu_ids="1,2"), script, []).num_local == 2


@pytest.mark.parametrize(
    ("said", "shown", "gpus"),
    [
        ({}, None, ["0", "1", "2"]),
        ({}, "4,5,6,7", ["4", "5", "6"]),
        ({"gpu_ids": "1,3"}, None, ["1", "3", "1"]),
        ({"ranks_per_replica": 2}, None, ["0,1", "2,3", "0,1"]),
        ({"use_cpu": True}, None, [None] * 3),
    ],
)
def test_each_replica_of_a_machine_has_gpus_of_its_own_as_far_as_there_are_enough(said, shown, gpus, monkeypatch):
    monkeypatch.setattr(elastic, "count_gpus", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with environ.patched({} if shown is None else {"CUDA_VISIBLE_DEVICES": shown}):
        places = elastic._gpus_of_each(LaunchSettings(elastic="1:8", **said), 3)
    assert [place.get("CUDA_VISIBLE_DEVICES") for place in places] == gpus


def test_a_module_that_a_finder_of_an_editable_install_knows_is_found(script, home, monkeypatch):
    (home / "elsewhere" / "project").mkdir(parents=True)
    for name in ("__init__.py", "train.py"):
        (home / "elsewhere" / "project" / name).touch()

    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None):
            return PathFinder.find_spec(name, [str(home / "elsewhere")]) if name == "project" else None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    assert make_plan(LaunchSettings(use_cpu=True, module=True), "project.train", []).num_local == 1
    with pytest.raises(ConfigError, match=r"There is no module 'project\.other'"):
        make_plan(LaunchSettings(use_cpu=True, module=True), "project.other", [])


def test_one_process_needs_no_agent_unless_it_is_watched(script):
    def alone(**said):
        return make_plan(LaunchSettings(use_cpu=True, **said), script, []).alone

    assert alone()
    watched = [{"num_processes": 2}, {"max_restarts": 1}, {"log_dir": "logs"}, {"tee": "1"}, {"json": True}]
    for settings in (*watched, MACHINES | {"machine_rank": 1}):
        assert not alone(**settings), settings


def test_a_replica_is_a_run_of_its_own_and_has_a_launcher_if_it_has_ranks_or_files(monkeypatch):
    monkeypatch.setattr(plans, "usable_cores", lambda: 9)
    at_meet = {"elastic": "1:2", "replicas": 2, "heartbeat_s": 1.0, "state_every": 5, "key_file": "k", "meet": "s3://x"}
    at_meet["grace_s"] = 7.0
    own = {"use_cpu": True, "ranks_per_replica": 2, "max_restarts": 2, "run_dir": "run"}
    at_port = {"elastic": "1:2", "main_process_ip": "a", "main_process_port": 7}
    for shared in (at_meet, at_port, {"join": "a:1"}):
        replica = plans.one_replica(LaunchSettings(**shared, **own))
        threads = 2 if "replicas" in shared else None
        alone = {"num_processes": 2, "num_cpu_threads_per_process": threads, "run_dir": "none"}
        assert replica == LaunchSettings(use_cpu=True, **alone)
    for given in {}, {"ranks_per_replica": 2}, {"tee": "1"}, {"log_dir": "logs"}:
        assert plans.has_launchers(LaunchSettings(elastic="1:2", **given)) == bool(given)


def test_threads_share_the_cores_unless_somebody_says_otherwise(script, monkeypatch):
    monkeypatch.setattr(plans, "usable_cores", lambda: 9)

    def told(settings):
        return make_plan(settings, script, []).variables.get("OMP_NUM_THREADS")

    def threads(**said):
        return told(LaunchSettings(use_cpu=True, **said))

    assert threads(num_processes=4) == "2"
    assert threads(num_processes=16 * 9) == "1"
    assert threads(num_processes=4, num_cpu_threads_per_process=5) == "5"
    assert threads() is None

    def of_replicas(**said):
        return told(plans.one_replica(LaunchSettings(use_cpu=True, **said)))

    assert of_replicas(elastic="1:3", replicas=3) == of_replicas(join="a:1", replicas=3) == "3"
    assert of_replicas(elastic="2:3") == "4"
    assert of_replicas(elastic="1:3", replicas=2, ranks_per_replica=2, meet="s3://bucket/run") == "2"
    assert of_replicas(elastic="1:3", replicas=3, num_cpu_threads_per_process=5) == "5"
    assert of_replicas(elastic="1:3") is None
    monkeypatch.undo()
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    monkeypatch.setattr(plans, "_CGROUP", Path("missing"))
    assert plans.usable_cores() == os.cpu_count()


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu.max": "250000 100000\n"}, 3),
        ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu.max": "6400000 100000\n"}, 8),
        ({"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
    ],
)
def test_a_containers_quota_limits_its_cores(files, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8), raising=False)
    monkeypatch.setattr(plans, "_CGROUP", tmp_path)
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert plans.usable_cores() == expected


def test_more_threads_than_fit_are_refused_unless_a_variable_asks_for_them(script, monkeypatch, capsys):
    monkeypatch.setattr(plans, "usable_cores", lambda: 2)
    settings = LaunchSettings(use_cpu=True, num_cpu_threads_per_process=96)
    with pytest.raises(ConfigError, match=r"^num_cpu_threads_per_process asks for 96 threads"):
        make_plan(settings, script, [])
    monkeypatch.setenv("OMP_NUM_THREADS", "96")
    with showing(Screen(settings)):
        assert make_plan(settings, script, []).variables["OMP_NUM_THREADS"] == "96"
    assert "OMP_NUM_THREADS is 96, but this machine has 2 usable cores" in capsys.readouterr().err


def test_without_a_port_the_processes_of_a_machine_meet_at_a_free_one():
    first, second = meet(LaunchSettings()), meet(LaunchSettings(main_process_port=0))
    assert (first.backend, first.endpoint, first.address) == ("static", "127.0.0.1:0", "127.0.0.1")
    assert first.run_id != second.run_id


def test_several_machines_meet_at_the_main_one():
    said = MACHINES | {"machine_rank": 1, "rdzv_conf": "timeout=30"}
    repeated = "rdzv_backend=c10d,rdzv_endpoint=node0:29500,rdzv_id=7"  # as Slurm scripts do, and torch ignores
    assert meet(LaunchSettings(**said | {"rdzv_conf": repeated})).endpoint == "10.0.0.1:29500"
    meeting = meet(LaunchSettings(**said))
    assert (meeting.backend, meeting.endpoint, meeting.num_machines) == ("static", "10.0.0.1:29500", 2)
    assert (meeting.run_id, meeting.address, meeting.listen) == ("farflung", meeting.interface.address, None)
    assert meeting.conf == {"rank": 1, "timeout": "30"}
    assert meet(LaunchSettings(**said | {"main_process_ip": "fd00::1"})).endpoint == "[fd00::1]:29500"
    meeting = meet(LaunchSettings(**said, rdzv_backend="c10d", main_process_port=4))
    assert (meeting.backend, meeting.endpoint, meeting.conf) == ("c10d", "10.0.0.1:4", {"timeout": "30"})


@pytest.mark.parametrize("said", [{}, {"num_machines": 2, "machine_rank": 1, "rdzv_backend": "c10d"}])
def test_an_address_with_a_zone_is_refused(said):
    with pytest.raises(ConfigError, match=r"^main_process_ip is 'fe80::1%eth0'; torch takes no .* Use one without"):
        meet(LaunchSettings(main_process_ip="fe80::1%eth0", **said))


def test_a_port_in_use_is_refused_where_this_machine_should_listen(script):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError, match=f"^Port {port} can't be used here: Address already in use. Choose another"
        ):
            meet(LaunchSettings(main_process_port=port))
        with pytest.raises(ConfigError, match=f"^Port {port} can't"):
            notebook_launcher(print, num_processes=2, use_port=str(port))
        assert make_plan(LaunchSettings(use_cpu=True, main_process_port=port), script, []).alone, "it meets nobody"
        elsewhere = MACHINES | {"main_process_port": port}
        assert meet(LaunchSettings(**elsewhere, machine_rank=1)).endpoint == f"10.0.0.1:{port}"
        with pytest.raises(ConfigError, match=f"Port {port}"):
            meet(LaunchSettings(**elsewhere))
    assert meet(LaunchSettings(main_process_port=port)).endpoint == f"127.0.0.1:{port}"


def test_a_process_alone_sees_a_world_of_one_whatever_run_it_is_started_in():
    others = ("LOCAL_RANK", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RESTART_COUNT", environ.LAUNCHER)
    with environ.patched({"RANK": "3", "WORLD_SIZE": "4", "KEPT": "1", **dict.fromkeys(others, "1")}):
        inner = lone_environment({"ACCELERATE_MIXED_PRECISION": "bf16"})
    there = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    there |= {"KEPT": "1", "ACCELERATE_MIXED_PRECISION": "bf16"}
    assert inner.items() >= there.items()
    assert not {*others} & inner.keys()


def test_torch_is_loaded_without_a_collection_of_garbage_and_is_silent_where_its_level_is_set():
    name = "TORCH_CPP_LOG_LEVEL"
    with environ.patched({name: "INFO"}):
        for variables, level in ({name: "ERROR"}, "FATAL"), ({}, "INFO"):
            with plans.torch_is_loaded(variables), plans.torch_is_loaded():
                assert (gc.isenabled(), environ.text(name)) == (False, level)
            assert (gc.isenabled(), environ.text(name)) == (True, "INFO")
