# SPDX-License-Identifier: Apache-2.0
"""Configuration files: which one counts, that words stay words, and that nothing in them is passed over."""

import json
from pathlib import Path
from unittest.mock import Mock

import pytest

from farflung.base.errors import ConfigError, Unsupported
from farflung.config import environ
from farflung.config.files import read_file, write_file
from farflung.config.places import accelerate_files, find_file, own_file
from farflung.config.resolve import resolve


def put(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def stated(text: str, home: Path) -> dict[str, object]:
    return {name: said.value for name, said in read_file(put(home / "train.yaml", text))[0].items()}


def test_files_are_looked_up_in_order(home, monkeypatch):
    assert find_file() is None
    theirs_json = put(home / ".cache/huggingface/accelerate/default_config.json", "{}")
    assert find_file() == theirs_json
    theirs = put(home / ".cache/huggingface/accelerate/default_config.yaml", "")
    assert find_file() == theirs
    own = put(home / ".config/farflung/config.yaml", "")
    assert find_file() == own == own_file()
    here = put(home / "farflung.yaml", "")
    assert find_file().resolve() == here
    named = put(home / "named.yaml", "")
    assert find_file("~/named.yaml") == named
    assert find_file(str(named)) == named
    assert resolve({"config_file": str(named)}).file == named
    with environ.patched({"FARFLUNG_CONFIG_FILE": str(named)}):
        assert resolve({}).file == named
        assert resolve({"config_file": str(own)}).file == own
    with pytest.raises(ConfigError, match=r"nowhere.yaml does not exist"):
        find_file("nowhere.yaml")
    monkeypatch.setenv("HF_HOME", str(home / "hub"))
    assert accelerate_files()[0] == home / "hub/accelerate/default_config.yaml"


def test_a_file_where_nobody_may_look_is_not_there(home, monkeypatch):
    def stat(path, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("pathlib.Path.stat", stat)
    monkeypatch.setattr("os.stat", stat)
    assert find_file() is None


def test_a_flag_for_replicas_overrules_the_number_of_ranks_that_accelerate_writes_into_its_file(home):
    put(home / "farflung.yaml", "num_processes: 1\nnum_machines: 2\nmachine_rank: 1\n")
    found = resolve({"elastic": "1:8"})
    assert (found.settings.num_processes, found.settings.num_machines, found.settings.machine_rank) == (None, 1, 0)
    (note,) = [one for one in found.notes if "overrules" in one]
    assert "num_machines is 2" in note
    with pytest.raises(ConfigError, match="num_processes"):
        resolve({"elastic": "1:8", "num_processes": "2"})
    put(home / "farflung.yaml", "num_processes: 2\nelastic: '1:8'\n")
    with pytest.raises(ConfigError, match="num_processes"):
        resolve({})


def test_folders_in_a_home_are_there(home):
    put(home / "farflung.yaml", "log_dir: ~/logs\nsave_on_signal: ~/saved\n")
    found = resolve({"run_dir": "~/runs/a"}).settings
    assert [found.run_dir, found.log_dir, found.save_on_signal] == [
        str(home / name) for name in ("runs/a", "logs", "saved")
    ]


def test_blocks_whose_questions_were_answered_with_no_ask_for_nothing(home):
    idle = "ipex_config:\n  ipex: no\n  use_xpu: False\nmpirun_config: {mpirun_hostfile: ''}\nfp8_config: {margin: }\n"
    assert stated(f"{idle}num_processes: 2\n", home) == {"num_processes": 2}
    asks = idle.replace("mpirun_hostfile: ''", "mpirun_hostfile: hosts")
    with pytest.raises(Unsupported, match=r"train.yaml:4: `mpirun_config` asks for starting mpirun"):
        stated(asks, home)


def test_a_file_that_can_not_be_read_is_named(home, monkeypatch):
    (home / "farflung.yaml").write_text("num_processes: 2\n")

    monkeypatch.setattr(Path, "read_text", Mock(side_effect=PermissionError(13, "Permission denied")))
    with pytest.raises(ConfigError, match=r"farflung.yaml can't be read: Permission denied"):
        resolve({})


def test_accelerates_own_file_is_read_with_cpu_too(home):
    put(accelerate_files()[0], "distributed_type: MULTI_GPU\nmixed_precision: bf16\nnum_processes: 4\n")
    settings = resolve({"use_cpu": True}).settings
    assert (settings.use_cpu, settings.multi_gpu, settings.num_processes) == (True, False, 4)
    assert settings.mixed_precision == "bf16"


@pytest.mark.parametrize("as_json", [False, True])
def test_what_accelerate_itself_writes_is_read(home, as_json):
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    theirs = config_args.ClusterConfig(
        compute_environment="LOCAL_MACHINE",
        distributed_type="MULTI_GPU",
        mixed_precision="fp16",
        use_cpu=False,
        debug=True,
        num_processes=4,
        gpu_ids="0,1,2,3",
        main_process_port=29511,
        dynamo_config={"dynamo_backend": "INDUCTOR", "dynamo_mode": "max-autotune", "dynamo_use_fullgraph": False},
    )
    path = home / "default_config.yaml"  # Accelerate puts JSON under this name too
    (theirs.to_json_file if as_json else theirs.to_yaml_file)(str(path))
    before = path.read_bytes()
    settings = resolve({"config_file": str(path)}).settings
    assert (settings.num_processes, settings.mixed_precision, settings.debug) == (4, "fp16", True)
    assert (settings.gpu_list, settings.main_process_port, settings.multi_gpu) == (("0", "1", "2", "3"), 29511, True)
    assert (settings.dynamo_backend, settings.dynamo_mode) == ("inductor", "max-autotune")
    assert (settings.dynamo_use_fullgraph, settings.dynamo_use_dynamic) == (False, None)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "text",
    [
        "dynamo_config: {dynamo_backend: EAGER, dynamo_use_dynamic: true}\n",
        "dynamo_config:\n  backend: eager\n  use_dynamic: true\n",
        "dynamo_backend: EAGER\ndynamo_use_dynamic: true\ndynamo_config: {}\n",
        "dynamo_config: null\ndynamo_backend: eager\ndynamo_use_dynamic: true\n",
    ],
)
def test_compiling_can_be_asked_for_in_a_block_or_without_one(home, text):
    assert stated(text, home) == {"dynamo_backend": "eager", "dynamo_use_dynamic": True}


@pytest.mark.parametrize("text", ["distributed_type: NO", "distributed_type: 'NO'", "distributed_type: no"])
def test_no_is_a_word_and_not_a_boolean(home, text):
    words = {"mixed_precision": "no", "log_dir": "off", "gpu_ids": "0"}
    assert stated(f"{text}\nmixed_precision: no\nlog_dir: off\ngpu_ids: 0\n", home) == words


def test_no_with_several_processes_is_one_process_and_says_so(home):
    (home / "farflung.yaml").write_text("distributed_type: NO\nnum_processes: 8\n")
    chosen = resolve({})
    assert (chosen.settings.num_processes, chosen.origins["num_processes"].place) == (1, "farflung.yaml:1")
    assert "farflung.yaml:2 says num_processes: 8" in chosen.notes[0]
    chosen = resolve({"num_processes": "2"})
    assert (chosen.settings.num_processes, chosen.notes) == (2, ())


@pytest.mark.parametrize("word", ["2", "never", "'maybe'"])
def test_yes_and_no_are_booleans_where_one_is_wanted(home, word):
    assert stated("debug: True\nquiet: false\n", home) == {"debug": True, "quiet": False}
    assert stated("debug: yes\nquiet: NO\n", home) == {"debug": True, "quiet": False}
    with pytest.raises(ConfigError, match=r"train.yaml:2: debug is .*; use true or false"):
        stated(f"num_processes: 2\ndebug: {word}\n", home)


def test_null_says_nothing_and_json_is_yaml(home):
    assert stated("gpu_ids: null\nmain_process_ip:\nnum_processes: ~\nlog_dir: 'null'\n", home) == {"log_dir": "null"}
    assert stated("", home) == {}
    text = json.dumps({"debug": True, "gpu_ids": None, "num_processes": 3, "fsdp_config": {}}, indent=4)
    assert stated(text, home) == {"debug": True, "num_processes": 3}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("inner: {recipe: diloco}\n", r"train.yaml:1: unknown key `inner`"),
        ("config_file: other.yaml\n", r"train.yaml:1: unknown key `config_file`"),
        ("dynamo_config:\n  mode: default\n  backnd: x\n", r"train.yaml:3: unknown key `dynamo_backnd`. Did you mean"),
        ("dynamo_config: inductor\n", r"train.yaml:1: dynamo_config must be a mapping"),
        ("dynamo_mode: default\ndynamo_config: {mode: max-autotune}\n", r"2: `dynamo_mode` appears twice"),
        ("num_processes: [2]\n", r"train.yaml:1: num_processes must be a plain value"),
        ("debug: true\n- 1\n", r"train.yaml:\d: this is not YAML"),
        ("debug: on\nrole: !!python/object:os.system x\n", r"train.yaml:2: `!!python/object:os.system` is a YAML tag"),
        ("role: !!int '2'\n", r"train.yaml:1: `!!int` is a YAML tag, which is not supported. Write the plain value"),
        ("outer: !mine\n  recipe: diloco\n", r"train.yaml:1: `!mine` is a YAML tag"),
        ("role: " + "[" * 3000 + "]" * 3000, r"train.yaml:1: mappings or lists are nested more than 20 deep; settings"),
        ("\n".join(" " * k + "x:" for k in range(3000)), r"train.yaml:21: mappings or lists are nested more than 20"),
        ("role: " + "[" * 3000, r"train.yaml:1: mappings or lists are nested more than 20 deep"),
    ],
)
def test_what_can_not_be_understood_is_refused_with_its_line(home, text, message):
    with pytest.raises(ConfigError, match=message):
        stated(text, home)


def test_neither_accelerates_own_file_nor_settings_that_can_not_work_are_written(home):
    theirs = put(accelerate_files()[0], "num_processes: 2\n")
    with pytest.raises(ConfigError, match="never writes"):
        write_file(theirs, {"num_processes": 1})
    assert theirs.read_text() == "num_processes: 2\n"
    with pytest.raises(ConfigError, match="1 or more"):
        write_file(home / "farflung.yaml", {"num_processes": 0})
    assert not (home / "farflung.yaml").exists()
