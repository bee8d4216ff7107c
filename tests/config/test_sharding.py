# SPDX-License-Identifier: Apache-2.0
"""The plugin of FSDP: Accelerate's words, what is made of them, and what is refused by name."""

import dataclasses
import inspect
import re
import warnings

import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin as Theirs
from accelerate.utils.fsdp_utils import get_parameters_from_modules as their_parameters
from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

from farflung.base.errors import ConfigError, Unsupported
from farflung.config import environ, sharding
from farflung.config.sharding import FullyShardedDataParallelPlugin as Plugin
from farflung.utils import get_parameters_from_modules
from tests.python import run_python

BY_BLOCK = {"auto_wrap_policy": "transformer_based_wrap"}
UNPINNED = fsdp.CPUOffloadPolicy(pin_memory=False)
BF16 = fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, torch.bfloat16)


class Block(nn.Sequential):
    """What a model repeats."""


class Blocks(nn.Sequential):
    """A model that names its own blocks, and one that it does not have."""

    _no_split_modules = ("Block", "VisionBlock")


def test_the_parameters_are_accelerates_in_its_order():
    theirs, ours = (list(inspect.signature(kind).parameters) for kind in (Theirs, Plugin))
    assert ours == theirs
    assert [field.name for field in dataclasses.fields(Plugin)] == theirs


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"reshard_after_forward": False, "state_dict_type": "full_state_dict"},
        {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_cls_names_to_wrap": "Block,Other"},
        {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 7, "cpu_offload": True},
        {"mixed_precision_policy": "bf16", "activation_checkpointing": True, "activation_checkpointing_offload": True},
        {"mixed_precision_policy": dict.fromkeys(("param_dtype", "reduce_dtype", "output_dtype"), torch.float16)},
        {"cpu_ram_efficient_loading": True, "ignored_modules": "head", "use_orig_params": True},
        {"fsdp_version": 2, "sync_module_states": False, "backward_prefetch": "NO_PREFETCH"},
    ],
)
def test_version_2_means_what_it_means_there(said, caplog):
    before = dict.fromkeys(["FSDP_CPU_RAM_EFFICIENT_LOADING"])  # which theirs sets
    with environ.patched(before), warnings.catch_warnings(action="ignore"):
        ours, theirs = Plugin(**said), Theirs(**{"fsdp_version": 2, **said})
    same = {field.name for field in dataclasses.fields(Plugin)}
    same -= {"auto_wrap_policy", "cpu_offload", "min_num_params", *(name for name in same if "state_dict" in name)}
    assert {name: getattr(ours, name) for name in same} == {name: getattr(theirs, name) for name in same}
    assert ours.state_dict_type == theirs.state_dict_type.name
    assert ours.offload_policy == theirs.cpu_offload
    ours.set_cpu_offload()
    assert ours.cpu_offload == theirs.cpu_offload
    model = Blocks(Block(nn.Linear(2, 2)), Block(nn.Linear(2, 2)))
    if "transformer_cls_names_to_wrap" in said:
        model.append(type("Other", (nn.Linear,), {})(2, 2))
    ours.set_auto_wrap_policy(model)
    theirs.set_auto_wrap_policy(model)
    mine, other = ours.auto_wrap_policy, theirs.auto_wrap_policy
    assert getattr(mine, "func", mine) == getattr(other, "func", other)
    assert getattr(mine, "keywords", None) == getattr(other, "keywords", None)


@pytest.mark.parametrize(
    ("said", "name", "value"),
    [
        ({"fsdp_version": 1}, "fsdp_version", 2),
        ({"fsdp_version": 1}, "state_dict_type", "FULL_STATE_DICT"),
        ({}, "state_dict_type", "SHARDED_STATE_DICT"),
        ({"fsdp_version": 1, "sharding_strategy": "FULL_SHARD"}, "reshard_after_forward", True),
        ({"sharding_strategy": fsdp.ShardingStrategy.SHARD_GRAD_OP}, "reshard_after_forward", False),
        ({"sharding_strategy": 2}, "reshard_after_forward", False),
        ({"fsdp_version": 1, "reshard_after_forward": "shard_grad_op"}, "reshard_after_forward", False),
        ({"fsdp_version": 1, "reshard_after_forward": "2"}, "reshard_after_forward", False),
        ({"reshard_after_forward": 2}, "reshard_after_forward", 2),
        ({"state_dict_type": fsdp.StateDictType.FULL_STATE_DICT}, "state_dict_type", "FULL_STATE_DICT"),
        ({"state_dict_type": "3"}, "state_dict_type", "SHARDED_STATE_DICT"),
        ({"cpu_offload": fsdp.CPUOffload(offload_params=True)}, "cpu_offload", True),
        ({"cpu_offload": fsdp.OffloadPolicy()}, "offload_policy", fsdp.OffloadPolicy()),
        ({"cpu_offload": UNPINNED}, "offload_policy", UNPINNED),
        ({"mixed_precision_policy": BF16}, "mixed_precision_policy", BF16),
        ({"mixed_precision_policy": torch.bfloat16}, "mixed_precision_policy", BF16),
        (
            {"mixed_precision_policy": fsdp.MixedPrecision(torch.bfloat16, buffer_dtype=torch.float32)},
            "mixed_precision_policy",
            fsdp.MixedPrecisionPolicy(torch.bfloat16),
        ),
        ({"auto_wrap_policy": transformer_auto_wrap_policy}, "auto_wrap_policy", "transformer_based_wrap"),
        ({"auto_wrap_policy": size_based_auto_wrap_policy}, "min_num_params", 100_000_000),
        ({"auto_wrap_policy": "size_based_wrap", "min_num_params": 0}, "min_num_params", 100_000_000),
        ({"auto_wrap_policy": "NO_WRAP"}, "auto_wrap_policy", None),
        ({"auto_wrap_policy": all}, "auto_wrap_policy", all),
        ({"backward_prefetch": "BACKWARD_PRE", "limit_all_gathers": True}, "backward_prefetch", None),
        ({"use_orig_params": False, "sync_module_states": True}, "use_orig_params", None),
    ],
)
def test_other_forms_and_version_1_are_translated(said, name, value):
    plugin = Plugin(**said)
    assert getattr(plugin, name) == value
    assert dataclasses.replace(plugin) == plugin


@pytest.mark.parametrize(
    ("said", "error", "message"),
    [
        ({"sharding_strategy": "NO_SHARD"}, Unsupported, "DDP replicates"),
        ({"sharding_strategy": fsdp.ShardingStrategy.HYBRID_SHARD}, Unsupported, r"True and ParallelismConfig\(dp_"),
        ({"sharding_strategy": "HYBRID_SHARD_ZERO2"}, Unsupported, "reshard_after_forward=False and"),
        ({"sharding_strategy": 1, "reshard_after_forward": False}, ConfigError, "Leave out sharding_strategy"),
        ({"state_dict_type": "LOCAL_STATE_DICT"}, Unsupported, "Use SHARDED_STATE_DICT"),
        (
            {"backward_prefetch": "SOMETIMES", "fsdp_version": 3, "min_num_params": 5},
            ConfigError,
            "fsdp_version is 3.*\n.*backward_prefetch is 'SOMETIMES'.*\n.*min_num_params is 5",
        ),
        ({"param_init_fn": print}, Unsupported, "param_init_fn"),
        ({"mixed_precision_policy": {"buffer_dtype": torch.bfloat16}}, Unsupported, "leaves buffers as they are"),
        ({"mixed_precision_policy": {"param": torch.bfloat16}}, ConfigError, "Did you mean `param_dtype`"),
        ({"mixed_precision_policy": {"param_dtype": "bf16"}}, ConfigError, "param_dtype is 'bf16'; it must be a dtype"),
        ({"mixed_precision_policy": "half"}, ConfigError, "use one of fp8, fp16, bf16, fp32"),
        ({"mixed_precision_policy": 5}, ConfigError, "mixed_precision_policy is 5"),
        ({"fsdp_version": 3}, ConfigError, "fsdp_version is 3"),
        ({"reshard_after_forward": 1}, ConfigError, "2 or more"),
        ({"reshard_after_forward": [True]}, ConfigError, "a number of ranks"),
        ({"reshard_after_forward": "sometimes"}, ConfigError, "reshard_after_forward is 'SOMETIMES'"),
        ({"auto_wrap_policy": "by_hand"}, ConfigError, "auto_wrap_policy is 'by_hand'"),
        ({"transformer_cls_names_to_wrap": ["Block"]}, ConfigError, "is for auto_wrap_policy='transformer_based_wrap'"),
        ({"min_num_params": 5}, ConfigError, "is for auto_wrap_policy='size_based_wrap'"),
        ({"auto_wrap_policy": "size_based_wrap", "min_num_params": -1}, ConfigError, "min_num_params is -1"),
        (BY_BLOCK | {"transformer_cls_names_to_wrap": "A,"}, ConfigError, "class names"),
        ({"cpu_offload": "yes"}, ConfigError, "CPUOffloadPolicy"),
        ({"ignored_modules": "("}, ConfigError, "no regular expression"),
        ({"ignored_modules": ["head"]}, ConfigError, "a list of modules"),
        ({"state_dict_config": "whole"}, ConfigError, "FullStateDictConfig"),
        ({"activation_checkpointing_offload": True}, ConfigError, "Set both"),
        ({"cpu_ram_efficient_loading": "yes"}, ConfigError, "True or False"),
    ],
)
def test_what_can_not_be_is_refused_by_name_with_what_to_use(said, error, message):
    with pytest.raises(error, match=message):
        Plugin(**said)


def test_what_a_script_leaves_out_is_read_from_the_environment():
    variables = {
        # What Accelerate's launcher sets besides, whatever is asked for.
        "FSDP_VERSION": "1",
        "FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP",
        "FSDP_RESHARD_AFTER_FORWARD": "true",
        "FSDP_MIN_NUM_PARAMS": "100000000",
        "FSDP_FORWARD_PREFETCH": "false",
        "FSDP_USE_ORIG_PARAMS": "true",
        "FSDP_SYNC_MODULE_STATES": "true",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    }
    with environ.patched(variables):
        plugin = Plugin()
        assert (plugin.reshard_after_forward, plugin.cpu_ram_efficient_loading) == (False, True)
        assert Plugin(reshard_after_forward=True).reshard_after_forward
    version_2 = {"FSDP_VERSION": "2", "FSDP_SHARDING_STRATEGY": "FULL_SHARD", "FSDP_RESHARD_AFTER_FORWARD": "0"}
    with environ.patched(version_2):
        assert Plugin().reshard_after_forward is False
    with environ.patched({"FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP", "FSDP_MIN_NUM_PARAMS": "0"}):
        assert Plugin().min_num_params == 100_000_000  # Accelerate's config files have 0 where nothing was said
    wrong = pytest.raises(ConfigError, match="FSDP_STATE_DICT_TYPE is")
    with environ.patched({"FSDP_STATE_DICT_TYPE": "WHOLE"}), wrong:
        Plugin()


def test_setters_change_what_trainers_change_later():
    plugin = Plugin(mixed_precision_policy=BF16, auto_wrap_policy="transformer_based_wrap")
    plugin.set_mixed_precision("fp16")
    assert plugin.mixed_precision_policy == BF16
    plugin.set_mixed_precision(torch.float32, override=True)
    assert plugin.mixed_precision_policy.reduce_dtype == torch.float32
    plugin.validate_mixed_precision_policy()
    plugin.mixed_precision_policy = "bf16"
    with pytest.raises(ConfigError, match="MixedPrecisionPolicy"):
        plugin.validate_mixed_precision_policy()
    plugin.set_state_dict_type("FULL_STATE_DICT")
    plugin.set_state_dict_type()
    assert plugin.state_dict_type == "FULL_STATE_DICT"
    plugin.cpu_offload = fsdp.CPUOffloadPolicy()
    plugin.set_cpu_offload()
    assert plugin.cpu_offload == fsdp.CPUOffloadPolicy()
    plugin.validate_cpu_offload()
    plugin.cpu_offload = "yes"
    with pytest.raises(ConfigError, match="cpu_offload"):
        plugin.validate_cpu_offload()
    with pytest.raises(ConfigError, match="Linear has no _no_split_modules"):
        plugin.set_auto_wrap_policy(nn.Linear(1, 1))
    plugin.set_auto_wrap_policy(Blocks(Block(nn.Linear(1, 1))))
    assert plugin.auto_wrap_policy.keywords == {"transformer_layer_cls": {Block}}
    config = fsdp.FullStateDictConfig(rank0_only=True)
    assert Plugin(state_dict_config=config).state_dict_config is config


def test_transformers_is_told_to_load_weights_once():
    with environ.patched({"ACCELERATE_USE_FSDP": None, "FSDP_CPU_RAM_EFFICIENT_LOADING": None}):
        sharding.enable_fsdp_ram_efficient_loading()
        assert Plugin().cpu_ram_efficient_loading
        sharding.disable_fsdp_ram_efficient_loading()
        assert not Plugin().cpu_ram_efficient_loading


def test_parameters_are_found_by_modules_and_by_their_names():
    model = Blocks(Block(nn.Linear(2, 2)), nn.Linear(2, 2, bias=False))
    for modules, number in ((None, 0), ([model[0]], 2), (r"0\.\d", 2), ("1", 1), ("", 3), ("head", 0)):
        found, theirs = (find(modules, model, "cpu") for find in (get_parameters_from_modules, their_parameters))
        assert (len(found), found) == (number, theirs)


def test_the_settings_alone_load_no_torch():
    code = "import sys; from farflung.config.grid import *; LayoutSettings(use_fsdp=True)"
    code += "; from farflung.config.sharding import *; FullyShardedDataParallelPlugin(cpu_offload=True)"
    assert run_python("-c", code + "; print('torch' in sys.modules)").stdout == "False\n"


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"backward_prefetch": "BACKWARD_POST"}, "prefetch is 'BACKWARD_POST'.*set_modules_to_backward_prefetch"),
        ({"forward_prefetch": True}, "forward_prefetch is True.*set_modules_to_forward_prefetch"),
        ({"limit_all_gathers": False}, "limit_all_gathers is False.*always limits"),
        ({"forward_prefetch": False, "limit_all_gathers": True, "backward_prefetch": "BACKWARD_PRE"}, ""),
    ],
)
def test_what_changes_no_result_is_read_and_said_once_on_rank_0(said, message, caplog):
    plugin = Plugin(**said)
    assert plugin == Plugin()
    assert re.search(message, caplog.text)
    assert len(caplog.records) == bool(message)
    caplog.clear()
    variables = {f"FSDP_{name.upper()}": str(value) for name, value in said.items()}
    for rank in ("0", "1"):
        with environ.patched({"RANK": rank, **variables}):
            assert Plugin() == plugin
        assert len(caplog.records) == bool(message)
