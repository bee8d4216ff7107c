# SPDX-License-Identifier: Apache-2.0
"""Questions, the default file, and what `config show` says of where values come from."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from farflung.base.errors import ConfigError
from farflung.config import environ
from farflung.config.launch import LaunchSettings
from farflung.config.places import own_file
from farflung.config.resolve import resolve
from farflung.cost.forecast import Forecast
from farflung.launch.ask import config, write_basic_config


@pytest.fixture(autouse=True)
def sets_nothing(home):
    """Nothing is launched here, so that no folder of a run needs to be turned off."""
    environ.remove("FARFLUNG_RUN_DIR")


def asked(answers: list[str], file: str | None = None, code: int = 0) -> str:
    """Answer the questions; return what was printed. The settings go into a file, or into one's own."""
    words = [] if file is None else ["--config_file", file]
    done = CliRunner().invoke(config, words, input="\n".join(answers) + "\n")
    assert done.exit_code == code, done.output
    return done.output


def settings_of(file: str) -> LaunchSettings:
    return resolve({"config_file": file}).settings


def test_answers_are_kept_and_count_and_those_that_can_not_work_are_asked_again(home):
    printed = asked(["y", "none", "0", "1", "0", "2", "bf61", "bf16", "n", "n", "n"])
    said = ("must be an integer", "num_machines is 0", "num_processes is 0", "one of no, fp16, bf16, fp8")
    assert all(message in printed for message in said), printed
    resolved = resolve({})
    assert resolved.file == own_file()
    assert resolved.settings == LaunchSettings(use_cpu=True, num_processes=2, mixed_precision="bf16")
    assert "which GPUs" not in printed.lower()  # on the CPU the question makes no sense
    assert "How many processes (empty: one)?: " in printed


def test_several_machines_are_asked_more(home):
    answers = ["n", "2", "1", "main", "29511", "8", "0,1,2,3", "fp16", "y", "c10d", "n", "n"]
    printed = asked(answers, "cluster.yaml")
    assert "--config_file cluster.yaml" in printed  # it is not looked up by itself
    assert "How many processes, on all machines together (empty: one per accelerator)?" in printed
    where = {"num_machines": 2, "machine_rank": 1, "main_process_ip": "main", "main_process_port": 29511}
    more = {"num_processes": 8, "gpu_ids": "0,1,2,3", "mixed_precision": "fp16", "debug": True, "rdzv_backend": "c10d"}
    assert settings_of("cluster.yaml") == LaunchSettings(**where, **more, config_file="cluster.yaml")


def test_empty_answers_are_the_defaults(home):
    assert OUTER in asked([""] * 8)  # there may be several accelerators
    assert resolve({}).settings == LaunchSettings()


def test_a_host_and_a_port_are_checked_when_they_are_typed(home):
    wrong = [("http://node0", "main_process_ip is"), ("node0:29500", "The port is main_process_port")]
    wrong += [("node 0", "main_process_ip is"), ("", "main_process_ip is not set")]
    ports = [("99999", "from 0 to 65535"), ("0", "several machines must agree"), ("x", "must be an integer")]
    answers = ["y", "2", "0", *(text for text, _ in wrong), "10.0.0.1", *(text for text, _ in ports), "29511"]
    printed = asked([*answers, "2", "no", "n", "static", "n", "n"])
    assert all(message in printed for _, message in wrong + ports), printed
    assert (resolve({}).settings.main_process_ip, resolve({}).settings.main_process_port) == ("10.0.0.1", 29511)


@pytest.mark.parametrize("host", ["node0", "node-0.cluster.local", "gpu_1", "10.0.0.1", "fe80::1%eth0", "::1"])
def test_hosts_are_names_or_addresses(host):
    assert LaunchSettings(num_machines=2, main_process_ip=host).main_process_ip == host


OUTER = "that they should synchronize less often than in every step?"


def test_one_process_is_not_asked_how_processes_agree(home):
    for number in ("1", ""):
        assert OUTER not in asked(["y", "1", number, "no", "n"], f"one{number}.yaml")
    assert OUTER in asked(["y", "2", "0", "main", "29511", "", "no", "n", "static", "n", "n"], "two.yaml")


def test_a_slow_line_becomes_a_recipe_by_the_cost_model(home):
    start = ["y", "1", "4", "no", "n", "n", "y"]
    printed = asked([*start, "100", "60Mbit", "5", "", "124M", "soon", "500ms", "20k"], "slow.yaml")
    for message in ("The answer is '100'; it must be a rate", "The answer is '5'", "The answer is 'soon'"):
        assert message in printed
    run = {"parameters": 124_000_000, "layers": 24, "step_s": 0.5, "replicas": 4, "latency_s": 1e-3}
    forecast = Forecast({**run, "bandwidth_bps": 60e6}, 20_000)
    assert forecast.advice().startswith("Use ")
    assert forecast.advice() in printed
    outer = forecast.rows[0].outer
    options = {name: value for name, value in outer.given().items() if name != "steps"}
    expected = {"use_cpu": True, "num_processes": 4, "outer_recipe": outer.recipe, "outer_options": options}
    assert settings_of("slow.yaml") == LaunchSettings(**expected, config_file="slow.yaml")
    assert "Use DDP: " in asked([*start, "1Tbit", "0", "124M", "500ms", "20k"], "fast.yaml")
    assert settings_of("fast.yaml").outer_recipe is None
    printed = asked([*start, "1kbit", "1s", "124M", "500ms", "20k"], "far.yaml")
    assert "No method gets far on this line: " in printed
    assert "; the closest is sparse_loco(" in printed
    assert settings_of("far.yaml").outer_recipe == "sparse_loco"


def test_each_of_several_machines_may_be_one_replica(home):
    start = ["y", "2", "0", "main", "29511", "8", "no", "n", "static", "n", "y", "y"]
    asked([*start, "2500Mbit", "", "1.1B", "1s", "20k"], "cluster.yaml")
    settings = settings_of("cluster.yaml")
    assert (settings.outer_recipe, settings.island_size) == ("diloco", "host")
    start[5:] = ["2", "no", "n", "static", "n", "y"]  # one process on each
    assert "of one machine" not in asked([*start, "2500Mbit", "", "1.1B", "1s", "20k"], "apart.yaml")


def test_sharding_is_asked_of_several_processes_and_its_rows_are_the_replicas(home):
    start = ["y", "1", "4", "no", "n", "y"]
    printed = asked([*start, "size_based_wrap", "-1", "1000", "n", "y", ""], "all.yaml")
    assert "min_num_params is -1" in printed
    assert OUTER not in printed  # one copy of the model: nothing to average
    expected = {"use_fsdp": True, "fsdp_auto_wrap_policy": "size_based_wrap", "fsdp_min_num_params": 1000}
    expected |= {"use_cpu": True, "num_processes": 4, "fsdp_activation_checkpointing": True}
    assert settings_of("all.yaml") == LaunchSettings(**expected, config_file="all.yaml")
    rest = "transformer_based_wrap Block n n 3 2 y 60Mbit 1ms 124M 500ms 20k"
    start[2] = "8"
    printed = asked([*start, *rest.split()], "grid.yaml")
    assert "The answer is '3'; use one of 2, 4, or leave it empty" in printed
    run = {"parameters": 62_000_000, "layers": 24, "step_s": 0.5, "replicas": 4, "latency_s": 0.001}
    assert Forecast({**run, "bandwidth_bps": 60e6}, 20_000).advice() in printed
    settings = settings_of("grid.yaml")
    assert settings.use_parallelism_config
    assert (settings.parallelism_config_dp_replicate_size, settings.parallelism_config_dp_shard_size) == (4, 2)
    assert settings.fsdp_transformer_layer_cls_to_wrap == "Block"
    assert settings.outer_recipe is not None


def test_a_file_that_is_there_is_replaced_only_when_told_so(home):
    (home / "mine.yaml").write_text("num_processes: 3\n")
    asked(["n", "y", "", "", "", ""], "mine.yaml", code=1)
    assert (home / "mine.yaml").read_text() == "num_processes: 3\n"
    asked(["y", "y", "", "", "", ""], "mine.yaml")
    assert settings_of("mine.yaml").use_cpu


def test_default_writes_a_file_once(home):
    done = CliRunner().invoke(config, ["default", "--mixed-precision", "fp16"])
    assert (done.exit_code, done.output) == (0, f"Written to {own_file()}.\n")
    assert resolve({}).settings == LaunchSettings(mixed_precision="fp16")
    again = CliRunner().invoke(config, ["default"])
    assert "was not changed" in again.output
    assert resolve({}).settings.mixed_precision == "fp16"


def test_write_basic_config_returns_the_path_or_false(home):
    path = write_basic_config(mixed_precision="bf16", save_location=home / "new" / "config.yaml")
    assert path == home / "new" / "config.yaml"
    assert settings_of(str(path)).mixed_precision == "bf16"
    assert write_basic_config(save_location=path) is False
    with pytest.raises(ConfigError, match="one of no, fp16, bf16"):
        write_basic_config("half", home / "other.yaml")
    assert not (home / "other.yaml").exists()


def test_show_says_where_each_value_came_from(home):
    (home / "farflung.yaml").write_text("debug: true\nnum_processes: 4\n")
    with environ.patched({"ACCELERATE_MIXED_PRECISION": "bf16"}):
        done = CliRunner().invoke(config, ["show", "--origin", "--num-processes", "2"])
    assert {
        "num_processes: 2 # flag --num_processes",
        "mixed_precision: bf16 # environment ACCELERATE_MIXED_PRECISION",
        "debug: true # file farflung.yaml:1",
        "tee: 0 # default",
    } <= {" ".join(line.split()) for line in done.output.splitlines()}
    assert not {"null", "main_process_ip:"} & {*done.output.split()}, "these have no value"
    assert "#" not in CliRunner().invoke(config, ["show"]).output
