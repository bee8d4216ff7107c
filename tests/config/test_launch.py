# SPDX-License-Identifier: Apache-2.0
"""The launch settings: one list, four places to say them, and one answer."""

import dataclasses
import re

import pytest
from accelerate.utils import TorchDynamoPlugin as TheirPlugin
from hypothesis import given, settings, strategies as st

from farflung.accelerator.settings import resolve_compile
from farflung.base.enums import DynamoBackend
from farflung.base.errors import ConfigError
from farflung.config import environ
from farflung.config.compile import TorchDynamoPlugin
from farflung.config.engines import EngineSettings
from farflung.config.files import write_file
from farflung.config.grid import LayoutSettings
from farflung.config.launch import FIELDS, LaunchSettings, field_named, rank_variables
from farflung.config.outer import OPTIONS
from farflung.config.resolve import resolve

# name -> what a file, the environment and a flag say of it
SAID = {
    "num_processes": ("2", "4", "6"),
    "num_machines": ("1", "3", "2"),
    "main_process_ip": ("a", "b", "c"),
    "main_process_port": ("1", "2", "3"),
    "gpu_ids": ("0", "1", "2"),
    "mixed_precision": ("fp16", "bf16", "no"),
    "gradient_accumulation_steps": ("2", "4", "8"),
    "gradient_clipping": ("0.5", "1.0", "2.0"),
    "num_cpu_threads_per_process": ("1", "2", "3"),
    "max_restarts": ("1", "2", "0"),
    "monitor_interval": ("0.5", "1.5", "0.1"),
    "hang_timeout_s": ("30", "2.5", "600"),
    "dynamo_backend": ("INDUCTOR", "eager", "aot_eager"),
    "dynamo_mode": ("max-autotune", "reduce-overhead", "default"),
    "dynamo_use_fullgraph": ("true", "no", True),
    "dynamo_use_dynamic": ("false", "1", False),
    "dynamo_use_regional_compilation": ("true", "0", True),
    "rdzv_backend": ("c10d", "static", "c10d"),
    "rdzv_conf": ("timeout=1", "timeout=2", "timeout=3"),
    "log_dir": ("no", "null", "off"),
    "tee": ("1", "2", "0:3"),
    "role": ("a", "b: c", "# d"),
    "use_cpu": ("true", "no", True),
    "debug": ("true", "0", True),
    "quiet": ("true", "off", True),
    "same_network": ("false", "1", False),
}


COMPILING = {
    "dynamo_backend": st.sampled_from([str(word).lower() for word in DynamoBackend]),
    "dynamo_mode": st.none() | st.sampled_from(["default", "reduce-overhead", "max-autotune"]),
    "dynamo_use_fullgraph": st.none() | st.booleans(),
    "dynamo_use_dynamic": st.none() | st.booleans(),
    "dynamo_use_regional_compilation": st.none() | st.booleans(),
}


@st.composite
def launch_settings(draw):
    """Settings that can work together, any of them said or left open."""
    machines = draw(st.integers(1, 4))
    gpus = draw(st.integers(1, 3))
    on_cpu = draw(st.booleans())
    words = st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), min_size=1).filter(str.strip)
    return {
        "num_machines": machines,
        "machine_rank": draw(st.integers(0, machines - 1)),
        "main_process_ip": "main" if machines > 1 else draw(st.none() | words),
        "main_process_port": draw(st.none() | st.integers(1, 65535)),
        "num_processes": draw(st.none() | st.just(gpus * machines)),
        "use_cpu": on_cpu,
        "gpu_ids": "all" if on_cpu else draw(st.sampled_from(["all", ",".join(map(str, range(gpus)))])),
        "mixed_precision": draw(st.sampled_from(["no", "fp16", "bf16"])),
        "gradient_accumulation_steps": draw(st.none() | st.integers(1)),
        "gradient_clipping": draw(st.none() | st.floats(0, exclude_min=True, allow_infinity=False)),
        "debug": draw(st.booleans()),
        "role": draw(words),
        "log_dir": draw(st.none() | words),
        "run_dir": draw(words),
        "quiet": draw(st.booleans()),
        "hang_timeout_s": draw(st.floats(0, allow_infinity=False)),
        **{name: draw(values) for name, values in COMPILING.items()},
    }


@settings(max_examples=60)
@given(said=launch_settings())
def test_what_is_said_in_the_environment_is_what_counts(said):
    variables = {f.variable: f.text(said[f.name]) for f in FIELDS if said.get(f.name) is not None}
    with environ.patched(variables):
        assert resolve({}).settings == LaunchSettings(**said)


@settings(max_examples=60)
@given(said=launch_settings())
def test_what_is_written_to_a_file_is_what_is_read(said, tmp_path_factory):
    path = write_file(tmp_path_factory.mktemp("files") / "farflung.yaml", said)
    with environ.patched({"FARFLUNG_RUN_DIR": None}):  # which tests set
        assert resolve({"config_file": str(path)}).settings == LaunchSettings(**said, config_file=str(path))


@settings(max_examples=60)
@given(said=st.fixed_dictionaries(COMPILING))
def test_what_is_said_of_compiling_reaches_the_script(said):
    told = rank_variables(LaunchSettings(**said))
    with environ.patched({name: value for name, value in told.items() if "DYNAMO" in name}):
        ours, theirs = TorchDynamoPlugin(), TheirPlugin()
        assert resolve_compile(None, None) == ours
        ours.check()  # as where it is used
    assert ours.to_dict() == theirs.to_dict()
    found = (str(ours.backend).lower(), ours.mode, ours.fullgraph, ours.dynamic, ours.use_regional_compilation)
    silent = {"dynamo_mode": "default", "dynamo_use_fullgraph": False, "dynamo_use_regional_compilation": False}
    assert found == tuple(silent.get(name) if said[name] is None else said[name] for name in COMPILING)


@pytest.mark.parametrize("name", sorted(SAID))
def test_a_flag_counts_before_the_environment_and_that_before_a_file_and_that_before_the_default(name, home):
    entry = field_named(name)
    in_file, in_environment, by_flag = SAID[name]

    def effective(flags):
        resolved = resolve(flags | ({} if name == "main_process_ip" else {"main_process_ip": "main"}))
        return getattr(resolved.settings, name), resolved.origins[name].kind

    assert effective({}) == (entry.default, "default")
    (home / "farflung.yaml").write_text(f"{name}: {in_file}\n")
    assert effective({}) == (entry.parse(in_file, name), "file")
    with environ.patched({entry.variable: in_environment}):
        value = entry.parse(in_environment, name)
        assert effective({}) == (value, "environment")
        said = by_flag if isinstance(by_flag, bool) else entry.parse(by_flag, name)
        assert effective({name: by_flag}) == (said, "flag")


def test_the_list_is_the_dataclass_and_the_options_of_the_outer_loop():
    own = [attribute.name for attribute in dataclasses.fields(LaunchSettings) if attribute.name != "outer_options"]
    last = {attribute.name for each in (LayoutSettings, EngineSettings) for attribute in dataclasses.fields(each)}
    own.sort(key=lambda name: name in last)
    assert [entry.name for entry in FIELDS if entry.name.removeprefix("outer_") not in OPTIONS] == own
    assert [entry.name for entry in FIELDS if entry.name not in own] == [f"outer_{name}" for name in OPTIONS]
    assert LaunchSettings() == LaunchSettings.of({entry.name: entry.default for entry in FIELDS})
    flags = [flag for entry in FIELDS for flag in entry.flags]
    assert len(set(flags)) == len(flags)
    assert all(entry.help for entry in FIELDS)


def test_ranks_are_told_what_was_set_and_nothing_that_was_left_open():
    told = rank_variables(LaunchSettings())
    # Accelerate lets ACCELERATE_GRADIENT_ACCUMULATION_STEPS overrule the script: nobody asked for that here.
    assert told == {
        "ACCELERATE_MIXED_PRECISION": "no",
        "ACCELERATE_USE_CPU": "false",
        "ACCELERATE_DEBUG_MODE": "false",
        "ACCELERATE_DYNAMO_BACKEND": "no",
        "FARFLUNG_HANG_TIMEOUT_S": "600.0",
    }
    numbers = {"gradient_accumulation_steps": 4, "gradient_clipping": 1.0, "num_cpu_threads_per_process": 2}
    told = rank_variables(LaunchSettings(mixed_precision="bf16", gpu_ids="1, 3", **numbers))
    expected = {"ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}
    expected |= {"ACCELERATE_GRADIENT_CLIPPING": "1.0", "OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": "1,3"}
    assert expected.items() <= told.items()
    assert rank_variables(LaunchSettings(quiet=True))["FARFLUNG_QUIET"] == "true"


def test_replicas_under_slurm_meet_in_the_folder_of_the_run_so_states_are_kept_there():
    kept = LaunchSettings(engine="slurm", elastic="2:16", state_every=2, heartbeat_s=5.0)
    assert (kept.state_every, kept.heartbeat_s) == (2, 5.0)
    with pytest.raises(ConfigError, match="which needs --meet in a folder or a bucket"):
        LaunchSettings(engine="ray", elastic="2:16", state_every=2)


FSDP = "use_fsdp: true\nnum_processes: 2\nfsdp_config:\n  fsdp_min_num_params: 5\n  fsdp_state_dict_type: odd\n"


@pytest.mark.parametrize(
    ("file", "flags", "lines"),
    [
        ("outer: {recipe: hierarchical, levels: odd}\n", {}, [r"farflung.yaml:1: levels is 'odd'; map each number .*"]),
        ("machine_rank: 1\n", {}, [r"farflung.yaml:1: machine_rank is 1 but num_machines is 1.*"]),
        ("tee: odd\n", {"role": "x"}, [r"farflung.yaml:1: tee is 'odd'; use a number from 0 to 3.*"]),
        ("role: x\n", {"tee": "odd"}, [r"--tee is 'odd'; use .* \(Settings .* were read from .*farflung.yaml.\)"]),
        ("role: x\n", {"module": True, "no_python": True}, [r"--module and --no_python exclude .*\(Settings that .*"]),
        (
            FSDP,
            {"fsdp_state_dict_type": "other"},
            [
                r"--fsdp_state_dict_type is 'OTHER'; it must be one of SHARDED_STATE_DICT.*",
                r"farflung.yaml:4: fsdp_min_num_params is 5, which is for auto_wrap_policy='size_based_wrap' alone.*",
            ],
        ),
    ],
)
def test_an_error_names_each_setting_as_it_was_written_and_the_file_only_if_no_line_does(home, file, flags, lines):
    (home / "farflung.yaml").write_text(file)
    with pytest.raises(ConfigError) as caught:
        resolve(flags)
    found = str(caught.value).split("\n")
    assert all(re.fullmatch(line, text) for line, text in zip(lines, found, strict=True)), found


@pytest.mark.parametrize("gpus", [("multi_gpu", "FARFLUNG_MULTI_GPU", "true"), ("gpu_ids", "FARFLUNG_GPU_IDS", "0,1")])
def test_what_asks_for_the_cpu_overrules_gpus_unless_both_are_equally_strong(gpus, home):
    name, variable, value = gpus
    said = True if value == "true" else value
    with environ.patched({"ACCELERATE_USE_CPU": "true"}):
        chosen = resolve({name: said, "num_processes": "2"})
        assert getattr(chosen.settings, name) in (False, "all")
        assert (rank_variables(chosen.settings)["ACCELERATE_USE_CPU"], chosen.settings.num_processes) == ("true", 2)
        assert chosen.notes == (f"ACCELERATE_USE_CPU asks for the CPU, so --{name} starts processes on the CPU.",)
        with pytest.raises(ConfigError, match="choose one"):
            resolve({name: said, "use_cpu": True})
        with environ.patched({variable: value}), pytest.raises(ConfigError, match="choose one"):
            resolve({})
    (home / "farflung.yaml").write_text("use_cpu: true\n")
    assert getattr(resolve({name: said}).settings, name) == said
    with environ.patched({variable: value}):
        chosen = resolve({"use_cpu": True}).settings
        assert chosen.use_cpu
        assert getattr(chosen, name) in (False, "all")
