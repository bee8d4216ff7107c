# SPDX-License-Identifier: Apache-2.0
"""`farflung test`, `estimate` and `to-fsdp2`, and the functions that Accelerate has for them."""

import argparse
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import torch
import yaml
from accelerate.commands import estimate as their_estimate, to_fsdp2 as their_to_fsdp2
from accelerate.test_utils.training import RegressionModel
from huggingface_hub import errors as hub_errors

from farflung import Accelerator
from farflung.base.errors import ConfigError, Unsupported
from farflung.commands import estimate, launch, test as door, to_fsdp2
from farflung.config.resolve import resolve
from farflung.demo import check
from farflung.testing.ranks import run_ranks
from farflung.utils import DistributedType

# Of a file for version 1, but for its strategy.
VERSION_1 = {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_backward_prefetch": "BACKWARD_PRE"}
VERSION_1 |= {"fsdp_forward_prefetch": False, "fsdp_offload_params": False, "fsdp_sync_module_states": True}
VERSION_1 |= {"fsdp_state_dict_type": "SHARDED_STATE_DICT", "fsdp_use_orig_params": True}


def converted(*words):
    to_fsdp2.to_fsdp2_command(to_fsdp2.to_fsdp2_command_parser().parse_args([str(word) for word in words]))


@pytest.mark.parametrize("key", ["fsdp_sharding_strategy", "fsdp_reshard_after_forward"])
@pytest.mark.parametrize("word", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_a_file_for_fsdp_1_gets_the_keys_of_version_2(key, word, home, caplog):
    config = {"distributed_type": "FSDP", "num_processes": 2, "use_cpu": True, "fsdp_config": {**VERSION_1, key: word}}
    (home / "one.yaml").write_text(yaml.safe_dump(config))
    converted("--config_file", "one.yaml", "--output-file", "two.yaml")
    written = yaml.safe_load((home / "two.yaml").read_text())
    assert sum("left out" in record.message for record in caplog.records) == 4
    assert written == their_to_fsdp2.convert_config_to_fsdp2(config)
    assert resolve({"config_file": "two.yaml"}).settings.fsdp_version == 2
    caplog.clear()
    converted("--config_file", "two.yaml", "--overwrite")
    assert yaml.safe_load((home / "two.yaml").read_text()) == written
    assert caplog.records[0].message == "Config already specifies FSDP2, skipping conversion..."


def test_what_can_not_be_converted_is_said(home):
    (home / "one.yaml").write_text("num_processes: 2\n")
    (home / "empty.yaml").write_text("")
    (home / "odd.yaml").write_text("day: 2026-13-45\n")
    for words, error, message in (
        (["--config_file", "no.yaml"], FileNotFoundError, "no.yaml"),
        (["--config_file", "one.yaml"], ConfigError, "--overwrite"),
        (["--config_file", "one.yaml", "--output_file", "empty.yaml"], FileExistsError, "--overwrite"),
        (["--config_file", "empty.yaml", "--overwrite"], ConfigError, "no settings"),
        (["--config_file", "odd.yaml", "--overwrite"], ConfigError, "values that can't be read: month must be"),
    ):
        with pytest.raises(error, match=message):
            converted(*words)
    converted("--config_file", "one.yaml", "--output_file", "two.yaml")
    assert yaml.safe_load((home / "two.yaml").read_text()) == {"num_processes": 2}
    for word in ("NO_SHARD", "HYBRID_SHARD"):  # Accelerate writes a file that shards over all processes
        with pytest.raises(Unsupported, match=word):
            to_fsdp2.convert_config_to_fsdp2({"fsdp_config": {"fsdp_sharding_strategy": word}})


@pytest.mark.package
def test_the_memory_of_a_model_follows_from_its_configuration(home, capsys):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    config.save_pretrained("bert")
    args = estimate.estimate_command_parser().parse_args(["bert", "--dtypes", "float32", "float16", "int4"])
    rows = estimate.gather_data(args)
    model = transformers.AutoModel.from_config(config)
    parts = [[*part.parameters(), *part.buffers()] for part in (model, model.embeddings)]
    total, largest = (sum(one.nbytes for one in part) for part in parts)
    assert [row[:1] + row[2:3] for row in rows] == [["float32", total], ["float16", total / 2], ["int4", total / 8]]
    assert rows[0][1] == largest  # a part that stays on one device
    assert rows[0][3] == their_estimate.estimate_training_usage(total, "float32")
    assert rows[1][3]["step"] == 4 * total  # Accelerate's says less than weights and moments in fp32 take
    assert set(rows[2][3].values()) == {-1}
    estimate.estimate_command(args)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 5
    assert printed[-1].split()[-1] == "-"


@pytest.fixture
def stand_in(home, monkeypatch):
    """Put a package of this name and these members in place of an installed one."""
    monkeypatch.syspath_prepend(str(home))

    def make(name: str, **members) -> None:
        (home / f"{name}-9.dist-info").mkdir()
        (home / f"{name}-9.dist-info" / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 9\n")
        module = ModuleType(name)
        vars(module).update(members, __spec__=ModuleSpec(name, None))
        monkeypatch.setitem(sys.modules, name, module)

    return make


def small_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(512, 512, bias=False), torch.nn.Linear(512, 256, bias=False))


TABLE = """\
Memory of owner/small in MiB, without activations:
  dtype  largest layer  total size  training with Adam
float32            1.0         1.5                 6.0
float16            0.5         0.8                 6.0
   int8            0.2         0.4                   -
   int4            0.1         0.2                   -
"""


def test_a_model_of_timm_is_a_table_of_its_memory(stand_in, monkeypatch, capsys):
    asked = []

    def create_model(name, pretrained):
        asked.append((name, pretrained))
        if name == "gone":
            raise RuntimeError("Unknown model")
        return small_model()

    stand_in("timm", create_model=create_model)
    monkeypatch.setattr("huggingface_hub.model_info", lambda repo, token: SimpleNamespace(library_name="timm"))
    estimate.estimate_command(estimate.estimate_command_parser().parse_args(["owner/small"]))
    assert capsys.readouterr().out == TABLE
    assert asked == [("hf-hub:owner/small", False)]
    with pytest.raises(RuntimeError, match="timm finds no model gone: Unknown model"):
        estimate.create_empty_model("gone", "timm")


@pytest.mark.parametrize(
    ("maps", "maker"), [({}, "AutoModel"), ({"AutoConfig": "a", "AutoModelForX": "b"}, "AutoModelForX")]
)
def test_a_model_of_transformers_has_no_memory_and_runs_code_that_is_trusted(maps, maker, stand_in, home):
    def from_pretrained(name, trust_remote_code, token):
        if name in ("gone", "odd", "asks"):
            raise {"gone": OSError("no file"), "odd": ValueError("Unrecognized model"), "asks": ValueError("trust")}[
                name
            ]
        return SimpleNamespace(auto_map=maps, asked=(name, trust_remote_code, token))

    def from_config(config, dtype, trust_remote_code):
        assert (config.asked, dtype, trust_remote_code) == (("here", True, "secret"), torch.float32, True)
        return small_model()

    members = {maker: SimpleNamespace(from_config=from_config)}
    stand_in("transformers", AutoConfig=SimpleNamespace(from_pretrained=from_pretrained), **members)
    (home / "here").mkdir()  # so no hub is asked
    model = estimate.create_empty_model("here", None, trust_remote_code=True, access_token="secret")
    assert {weight.device.type for weight in model.parameters()} == {"meta"}
    for name, error in (("gone", RuntimeError), ("odd", RuntimeError), ("asks", ValueError)):
        with pytest.raises(error):
            estimate.create_empty_model(name, "transformers")


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (hub_errors.GatedRepoError, OSError, "owner/x is gated"),
        (hub_errors.RepositoryNotFoundError, OSError, "There is no model owner/x"),
        (ConnectionError, OSError, "the hub can't be reached"),
        (None, ConfigError, "does not name the library of owner/x. Give --library_name"),
        ("fastai", ConfigError, "owner/x is a model of fastai; only"),
        ("timm", ImportError, "pip install timm"),
    ],
)
def test_models_that_are_not_there_are_errors_of_the_right_kind(answer, error, words, monkeypatch):
    def model_info(repo, token):
        if isinstance(answer, type):
            raise answer.__new__(answer)
        return SimpleNamespace(library_name=answer)

    monkeypatch.setattr("huggingface_hub.model_info", model_info)
    monkeypatch.setattr("farflung.launch.estimate.is_installed", lambda name: name != "timm")
    with pytest.raises(error, match=words):
        estimate.create_empty_model("owner/x", None)


def test_timm_gets_the_names_that_it_knows():
    names = ("resnet50.a1_in1k", "timm/resnet50.a1_in1k", "hf-hub:timm/resnet50.a1_in1k", "local-dir:/path/to/model")
    for module in (estimate, their_estimate):
        prefixed = [module.add_timm_hub_prefix(name) for name in names]
        assert prefixed == [names[0], names[2], *names[2:]]


@pytest.mark.parametrize("size", [1, 2])
def test_the_test_passes_where_processes_are_connected(size):
    run_ranks(check.main, size, connect=False)


def fails_alone():
    Accelerator.gather_for_metrics = lambda self, batch: batch
    check.main()


def test_the_test_fails_where_samples_are_missing():
    with pytest.raises(Exception, match="of 95 samples the processes saw"):
        run_ranks(fails_alone, 2, connect=False)


@pytest.mark.usefixtures("warm")
def test_the_test_is_a_command_and_a_function(home, capfd):
    (home / "two.yaml").write_text("use_cpu: true\nnum_processes: 2\nmixed_precision: bf16\n")
    door.test_command(door.test_command_parser().parse_args(["--config_file", "two.yaml"]))
    printed = capfd.readouterr().out
    assert all(words in printed for words in ("2 process(es)", "training: passed", "The test has passed"))


def test_commands_are_theirs_too():
    parser = argparse.ArgumentParser()
    subparsers = parser.add_subparsers()
    for add, line, command in (
        (door.test_command_parser, "test", door.test_command),
        (estimate.estimate_command_parser, "estimate-memory bert", estimate.estimate_command),
        (to_fsdp2.to_fsdp2_command_parser, "to-fsdp2 --config_file a", to_fsdp2.to_fsdp2_command),
        (launch.launch_command_parser, "launch --num_processes 2 train.py x", launch.launch_command),
    ):
        add(subparsers)
        assert parser.parse_args(line.split()).func is command


def test_what_is_prepared_can_be_asked():
    accelerator, model = Accelerator(cpu=True), RegressionModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(range(4))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    prepared = accelerator.prepare(model, optimizer, loader, scheduler, [1])
    assert [getattr(one, "_is_accelerate_prepared", False) for one in prepared] == [True] * 4 + [False]


def test_tpu_is_a_name_that_no_run_has():
    assert Accelerator(cpu=True).distributed_type != DistributedType.TPU
    assert DistributedType("XLA") is DistributedType.TPU
