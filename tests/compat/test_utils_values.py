# SPDX-License-Identifier: Apache-2.0
"""Helpers over plain values, trees and modules: Accelerate's answers on the same inputs."""

import json
import socket
from collections import OrderedDict, namedtuple
from types import SimpleNamespace

import accelerate
import accelerate.utils as theirs
import accelerate.utils.constants as their_constants
import accelerate.utils.dataclasses as their_dataclasses
import accelerate.utils.memory as their_memory
import accelerate.utils.operations as their_operations
import accelerate.utils.other as their_other
import numpy as np
import pytest
import torch
from accelerate.commands.config import load_config_from_file as their_load
from accelerate.utils.modeling import convert_file_size_to_int as their_size
from torch import nn

import farflung
import farflung.utils as ours
import farflung.utils.constants as our_constants
import farflung.utils.dataclasses as our_dataclasses
import farflung.utils.imports as our_imports
import farflung.utils.memory as our_memory
import farflung.utils.operations as our_operations
import farflung.utils.other as our_other
from farflung.base.errors import ConfigError, Unsupported
from farflung.commands.config import load_config_from_file as our_load
from farflung.state import PartialState
from farflung.testing.ranks import run_ranks

Pair = namedtuple("Pair", ["first", "second"])
TREES = {
    "tensor": lambda: torch.arange(6.0).view(2, 3),
    "list": lambda: [torch.ones(2, 3), torch.zeros(2)],
    "pair": lambda: Pair(torch.ones(2, dtype=torch.float16), torch.zeros(2, 1, dtype=torch.bfloat16)),
    "dictionary": lambda: OrderedDict(a=torch.ones(3), b=[torch.zeros(3, 2, dtype=torch.int64)]),
    "others": lambda: {"a": torch.ones(3), "b": "text", "c": None, "d": (1, torch.ones(1))},
}


def plain(tree):
    """A tree in words and numbers, for comparison."""
    if isinstance(tree, torch.Tensor):
        return (tree.dtype, tree.tolist())
    if type(tree).__name__ == "TensorInformation":
        return ("information", tree.shape, tree.dtype)
    if isinstance(tree, dict):
        return {type(tree).__name__: {key: plain(value) for key, value in tree.items()}}
    if isinstance(tree, (list, tuple)):
        return (type(tree).__name__, [plain(value) for value in tree])
    return tree


def attempt(action, *arguments, **kwargs):
    """The value of a call, or which of the two usual errors it raised."""
    try:
        return plain(action(*arguments, **kwargs))
    except (ValueError, TypeError) as error:
        return ValueError if isinstance(error, ValueError) and not isinstance(error, TypeError) else TypeError


ASKED_OF_TREES = """
convert_to_fp32 find_batch_size find_device get_data_structure get_shape ignorant_find_batch_size is_namedtuple
is_tensor_information is_torch_tensor listify send_to_device slice_tensors
"""
ARGUMENTS = {"send_to_device": ("cpu",), "slice_tensors": (slice(1, 3),)}


@pytest.mark.parametrize("name", ASKED_OF_TREES.split())
def test_a_tree_gives_what_it_gives_there(name):
    functions = (getattr(our_operations, name), getattr(their_operations, name))
    for tree, make in TREES.items():
        mine, other = (attempt(function, make(), *ARGUMENTS.get(name, ())) for function in functions)
        assert mine == other, tree


def test_a_batch_size_is_found_where_it_is_found_there():
    for data in ([], {}, (), [[]], "text", [3], {"a": "x"}, None, [torch.ones(4), "text"]):
        for name in ("find_batch_size", "ignorant_find_batch_size"):
            assert attempt(getattr(ours, name), data) == attempt(getattr(theirs, name), data), data
    with pytest.raises(ConfigError, match="no batch size"):
        ours.find_batch_size(torch.tensor(1.0))


def test_tensors_are_made_of_what_is_known_of_them():
    for module in (ours, theirs):
        tree = {"a": [module.TensorInformation(torch.Size([2, 3]), torch.int32)], "b": "text"}
        made = module.initialize_tensors(tree)
        assert (made["a"][0].shape, made["a"][0].dtype, made["b"]) == ((2, 3), torch.int32, "text")
        assert module.is_tensor_information(tree["a"][0])


def test_functions_are_applied_and_trees_are_joined_as_there():
    for module in (ours, theirs):
        tree = module.recursively_apply(lambda x, y: x + y, Pair(torch.ones(1), [torch.zeros(1)]), 2)
        assert plain(tree) == plain(Pair(torch.full((1,), 3.0), [torch.full((1,), 2.0)]))
        assert module.recursively_apply(lambda x: x * 2, [1, "a"], test_type=lambda x: x == 1) == [2, "a"]
        with pytest.raises(TypeError):
            module.recursively_apply(abs, ["text"], error_on_other_type=True)
        parts = [{"x": torch.full((n, 2), n), "y": (torch.full((n,), -n),)} for n in (1, 3)]
        joined = {"x": torch.tensor([[1, 1]] + 3 * [[3, 3]]), "y": (torch.tensor([-1, -3, -3, -3]),)}
        assert plain(module.concatenate(parts)) == plain(joined)
        assert module.concatenate([torch.zeros(2, 1), torch.zeros(2, 2)], dim=1).shape == (2, 3)
        with pytest.raises(TypeError, match="tensor"):
            module.concatenate([{"note": "first"}, {"note": "second"}])
        with pytest.raises(RuntimeError):
            module.concatenate([torch.ones(5, 10), torch.ones(5, 12)])
        assert module.honor_type(Pair(1, 2), iter([3, 4])) == Pair(3, 4)
        kept = module.send_to_device({"a": torch.ones(1), "b": torch.ones(1)}, "meta", skip_keys="a")
        assert (kept["a"].device.type, kept["b"].device.type) == ("cpu", "meta")
    assert ours.concatenate(["alone"]) == "alone"


@pytest.mark.parametrize("sizes", [(1, 2, 2), (3, 2, 4), (4, 3, 6), (2, 6, 6), (61, 6, 66), (8, 2, 8)])
def test_the_last_sample_is_repeated_until_all_ranks_get_equally_many(sizes):
    size, ranks, padded = sizes
    batch = {"x": torch.arange(size * 3.0).reshape(size, 3)}
    found = ours.pad_input_tensors(batch, size, ranks)["x"]
    assert torch.equal(found, torch.cat([batch["x"], batch["x"][-1:].expand(padded - size, 3)]))
    assert torch.equal(ours.pad_input_tensors(batch["x"].T, size, ranks, dim=1), found.T)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float64", "int64"])
def test_outputs_are_converted_to_fp32_as_there(name):
    dtype = getattr(torch, name)

    def forward(x):
        """Documented."""
        return {"out": x.to(dtype), "other": "text"}

    expected = plain(their_operations.ConvertOutputsToFp32(forward)(torch.ones(2)))
    for module in (our_operations, their_operations):
        assert plain(module.convert_outputs_to_fp32(forward)(torch.ones(2))) == expected
        assert module.ConvertOutputsToFp32(forward).__doc__ == "Documented."


def test_sizes_in_words_and_bytes():
    for size in (0, 5, 1023, 1024, 1500, 5 * 2**20, 3.5 * 2**30, 2**45, 2**52, 2**60):
        assert ours.convert_bytes(size) == theirs.convert_bytes(size)
    words = [0, 5, "5GB", "5.5MB", "1KB", "2GiB", "1.5MiB", "3KiB", "8Gb", "8mb", "8kb", "5gib", "5", "5XB", "GB"]
    for size in [*words, "-5GB", -1]:
        mine, other = (attempt(convert, size) for convert in (ours.convert_file_size_to_int, their_size))
        assert mine == other, size


def test_dictionaries_names_and_attributes():
    for module in (ours, theirs):
        inner = {"b": 1, "c": {"d": 2}}
        merged = module.merge_dicts({"a": {"c": {"e": 3}}, "f": 4}, {"a": inner})
        assert merged == {"a": {"b": 1, "c": {"d": 2, "e": 3}}, "f": 4}
        assert merged["a"] is inner
        model = nn.Sequential(nn.Linear(1, 2))
        assert module.recursive_getattr(model, "0.weight.shape") == (2, 1)
        with pytest.raises(AttributeError):
            module.recursive_getattr(model, "0.nothing")
        named = {"Linear": nn.Linear, "Sequential.forward": model.forward, "Sequential": model, "len": len, "int": 3}
        assert {module.get_pretty_name(obj): obj for obj in named.values()} == named


def test_mixed_precision_is_put_together_as_there():
    for library in (accelerate, farflung):
        library.Accelerator(cpu=True, mixed_precision="bf16")
    for module in (ours, theirs):
        layer = nn.Linear(2, 1)
        off = module.AutocastKwargs(enabled=False)
        for arguments, dtype in ((True,), torch.bfloat16), ((True, off), torch.float32), ((), torch.float32):
            with module.get_mixed_precision_context_manager(*arguments):
                assert layer(torch.ones(1, 2)).dtype is dtype
        with module.GatheredParameters(layer.parameters(), modifier_rank=0):
            assert not module.is_peft_model(layer)
    assert ours.get_grad_scaler(init_scale=8.0).get_scale() == 8.0


def copied_from_one_rank():
    rank = PartialState().process_index
    tensor = torch.arange(6, dtype=torch.int16).view(2, 3) if rank == 1 else None
    copied = ours.copy_tensor_to_devices(tensor)
    try:
        ours.copy_tensor_to_devices(None)
    except our_operations.DistributedOperationException as error:
        return copied.tolist(), str(copied.dtype), str(error)


def test_a_tensor_of_one_rank_is_copied_to_all():
    refused = "copy_tensor_to_devices: ranks [] of 2 brought a tensor; exactly one rank must."
    assert run_ranks(copied_from_one_rank, 2) == [([[0, 1, 2], [3, 4, 5]], "torch.int16", refused)] * 2


def test_functions_that_need_deepspeed_cannot_be_called():
    with pytest.raises(Unsupported, match="copied_from_one_rank belongs to DeepSpeed"):
        our_imports.deepspeed_required(copied_from_one_rank)()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
        self.head = nn.Sequential(nn.ReLU(), nn.Linear(1, 1))


def test_modules_are_listed_and_asked_as_there():
    model = Block()
    for fqns in (False, True):
        listed = ours.get_module_children_bottom_up(model, return_fqns=fqns)
        assert listed == theirs.get_module_children_bottom_up(model, return_fqns=fqns)
    assert listed[-1] == ("", model)
    for module in (our_dataclasses, their_dataclasses):
        assert module.get_module_class_from_name(model, "ReLU") is nn.ReLU
        assert module.get_module_class_from_name(model, "Tanh") is None
    for module in (our_other, their_other):
        assert [module.is_repeated_blocks(m) for m in (model, model.layers, model.head)] == [False, True, False]
        assert [module.has_repeated_blocks(m) for m in (model, model.layers, model.head)] == [True, True, False]
        assert not module.model_has_dtensor(model)
        assert not module.is_compiled_module(model)
        assert not module.has_compiled_regions(model)
        assert module.extract_model_from_parallel(nn.DataParallel(model)) is model


def test_the_degree_of_tensor_parallelism_is_read_as_there():
    configs = [SimpleNamespace(), SimpleNamespace(distributed_config={"tp_size": 2})]
    configs += [SimpleNamespace(distributed_config=found) for found in (SimpleNamespace(tp_size=3), None)]
    unset = {"tp_size": None, "config": configs[1]}
    for attributes in ({}, {"tp_size": 4}, unset, *({"config": config} for config in configs)):
        model = SimpleNamespace(**attributes)
        assert ours.get_model_tp_size(model) == theirs.get_model_tp_size(model), attributes


@pytest.mark.long
def test_memory_is_released():
    for module in (our_memory, their_memory):
        assert module.release_memory([1], "x") == [None, None]
        module.clear_device_cache(garbage_collection=True)


def test_errors_that_say_that_memory_is_out():
    for error in (
        RuntimeError("CUDA out of memory."),
        RuntimeError("MPS backend out of memory (x)"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: x"),
        RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED."),
        RuntimeError("something else"),
        RuntimeError("CUDA out of memory.", "two"),
        ValueError("CUDA out of memory."),
        torch.OutOfMemoryError("CUDA out of memory."),
    ):
        assert our_memory.should_reduce_batch_size(error) == their_memory.should_reduce_batch_size(error), error


@pytest.mark.parametrize("fits", [16, 11, 1, 0])
@pytest.mark.parametrize("own", [False, True])
def test_batch_sizes_are_tried_in_the_same_order(fits, own, monkeypatch):
    monkeypatch.setattr("gc.collect", lambda: 0)  # it takes a while with all that the tests have imported

    def tried(module):
        seen = []
        sizes = iter([8, 4, 2, 1, 0])

        def train(batch_size, word, more=None):
            seen.append((batch_size, word, more))
            if batch_size > fits:
                raise RuntimeError("CUDA out of memory.")
            return batch_size

        chosen = {"reduce_batch_size_fn": lambda: next(sizes)} if own else {}
        found = module.find_executable_batch_size(train, starting_batch_size=16, **chosen)
        try:
            return found("x", more=2), found("again"), seen
        except RuntimeError as error:
            return str(error), seen

    assert tried(ours) == tried(theirs)


def test_where_not_even_one_fits_the_error_has_its_cause_without_what_it_held_in_memory():
    @ours.find_executable_batch_size(starting_batch_size=1)
    def train(batch_size):
        raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB.")

    with pytest.raises(RuntimeError, match="reached zero") as found:
        train()
    assert "Tried to allocate 2 GiB" in str(found.value.__cause__)
    assert found.value.__cause__.__traceback__ is None


@pytest.mark.long
def test_wrong_calls_of_a_function_that_looks_for_its_batch_size():
    for module in (ours, theirs):

        @module.find_executable_batch_size(starting_batch_size=4)
        def train(batch_size):
            raise KeyError("another error")

        with pytest.raises(KeyError, match="another"):
            train()
        with pytest.raises(TypeError, match="atch size"):
            train(4)


def test_constants_are_accelerates():
    theirs_named = {name: value for name, value in vars(their_constants).items() if name.isupper()}
    assert {name: getattr(our_constants, name, None) for name in theirs_named} == theirs_named


ENUMERATIONS = """
ComputeEnvironment CustomDtype DDPCommunicationHookType DistributedType DynamoBackend FP8BackendType LoggerType
PrecisionType RNGType SageMakerDistributedType
"""


@pytest.mark.parametrize("name", ENUMERATIONS.split())
def test_enumerations_have_the_same_members(name):
    mine, other = getattr(our_dataclasses, name), getattr(their_dataclasses, name)
    assert {member.name: member.value for member in mine} == {member.name: member.value for member in other}
    if hasattr(other, "list"):
        assert mine.list() == other.list()
        assert other.list()[0] in mine
        assert "nothing" not in mine


@pytest.mark.package
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"dp_shard_size": 4},
        {"dp_replicate_size": 4},
        {"dp_replicate_size": 2, "dp_shard_size": 2},
        {"dp_shard_size": 2, "cp_size": 2, "tp_size": 2},
        {"tp_size": 8},
        {"sp_size": 2},
    ],
)
def test_a_configuration_of_parallelism_says_the_same_of_its_axes(sizes):
    mine = ours.ParallelismConfig(**sizes)
    made = {} if "sp_size" not in sizes else {"sp_handler": object()}  # theirs asks for DeepSpeed
    other = theirs.ParallelismConfig(**sizes, **made)
    names = {name for name in dir(other) if name[0] != "_" and not callable(getattr(other, name))}
    names -= {"fsdp_dim_names", "tp_handler", "cp_handler", "sp_handler"}
    assert {name: getattr(mine, name) for name in names} == {name: getattr(other, name) for name in names}
    assert mine.fsdp_dim_names == mine.dp_cp_dim_names  # axes that are not joint with others
    assert repr(mine.cp_handler) == repr(other.cp_handler)
    assert mine.to_json() == vars(mine)  # None, there
    assert mine == ours.ParallelismConfig(**sizes) != ours.ParallelismConfig(dp_shard_size=64)
    if sizes and "sp_size" not in sizes:
        assert mine._get_mesh() == other._get_mesh()


@pytest.mark.package
def test_axes_of_a_configuration_that_do_not_fit_are_refused(monkeypatch):
    assert ours.ParallelismConfig().build_device_mesh("cpu") is theirs.ParallelismConfig().build_device_mesh("cpu")
    for wrong in ({"cp_size": 0}, {"cp_size": 2, "sp_size": 2}, {"tp_size": 2, "dp_replicate_size": 2}):
        for library in (ours, theirs):
            with pytest.raises(ValueError, match=max(wrong, key=len)):
                library.ParallelismConfig(**wrong)
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "2")
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_COMM_STRATEGY", "ring")
    for library in (ours, theirs):
        with pytest.raises(ValueError, match="Invalid cp_comm_strategy: ring"):
            library.ParallelismConfig()


def test_state_dicts_are_cleaned_for_safetensors_without_losing_parts_of_a_tensor():
    accelerate.PartialState(cpu=True)
    base = torch.arange(4.0)
    state = OrderedDict(tied=base, again=base, turned=torch.ones(2, 3).T, word="x")
    mine = ours.clean_state_dict_for_safetensors(state)
    assert plain(mine) == plain(dict(theirs.clean_state_dict_for_safetensors(OrderedDict(state))))
    assert mine["turned"].is_contiguous()
    halves = OrderedDict(first=base[:2], second=base[2:])
    assert list(ours.clean_state_dict_for_safetensors(halves)) == ["first", "second"]
    assert list(theirs.clean_state_dict_for_safetensors(OrderedDict(halves))) == ["first"]


def test_objects_are_saved_and_loaded_as_there(tmp_path):
    accelerate.PartialState(cpu=True)
    obj = {"tensor": torch.ones(2), "array": np.arange(3, dtype=np.uint32), "list": [1, "x"]}
    for writer in (ours, theirs):
        writer.save(obj, tmp_path / "file")
        for reader in (ours, theirs):
            read = reader.load(tmp_path / "file", map_location="cpu")
            assert (read["tensor"].tolist(), read["array"].tolist(), read["list"]) == ([1, 1], [0, 1, 2], [1, "x"])
        writer.save(OrderedDict(w=torch.ones(2)), tmp_path / "safe", safe_serialization=True, save_on_each_node=True)
    for reader in (ours, theirs):
        torch.save(SimpleNamespace(x=1), tmp_path / "code")
        with pytest.raises(Exception, match=r"[Ww]eights"):
            reader.load(tmp_path / "code")
        assert reader.load(tmp_path / "code", weights_only=False).x == 1


def test_the_backend_is_left_to_the_device_unless_it_is_named():
    assert (ours.InitProcessGroupKwargs().backend, theirs.InitProcessGroupKwargs().backend) == (None, "nccl")


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_not_padded(layout):
    accelerate.PartialState(cpu=True)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
    for module in (ours, theirs):
        with pytest.warns(module.CannotPadNestedTensorWarning):
            assert module.pad_across_processes(nested) is nested
        with pytest.warns(module.CannotPadNestedTensorWarning) as caught:
            padded = module.pad_across_processes({"a": nested, "b": torch.ones(2)})
        words = "pad_across_processes: a nested tensor can't be padded; it is returned as it is."
        assert module is theirs or (str(caught[0].message), caught[0].filename) == (words, __file__)
        assert padded["a"] is nested
        assert padded["b"].tolist() == [1.0, 1.0]


def test_ports_are_found_free_and_in_use():
    for module in (our_other, their_other):
        port = module.get_free_port()
        assert not module.is_port_in_use(port)
        with socket.create_server(("localhost", port)):
            assert module.is_port_in_use(port)


def test_configuration_files_are_read_as_objects(tmp_path):
    file = tmp_path / "train.yaml"
    file.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\nmixed_precision: bf16\nnum_processes: 4\n"
        "num_machines: 2\nmachine_rank: 1\nmain_process_ip: node0\nmain_process_port: 29501\nuse_cpu: true\n"
        "debug: false\ndynamo_config:\n  dynamo_backend: INDUCTOR\n"
    )
    mine, other = our_load(str(file)), their_load(str(file))
    for name in ("num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port", "use_cpu"):
        assert getattr(mine, name) == getattr(other, name), name
    assert (mine.mixed_precision, mine.distributed_type.value) == ("bf16", other.distributed_type.value)
    assert mine.dynamo_config["dynamo_backend"].upper() == other.dynamo_config["dynamo_backend"]
    file.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nnum_processes: 4\nmixed_precision: bf16\n"
        "use_cpu: false\nfsdp_config:\n  fsdp_version: 2\n  fsdp_offload_params: true\n"
        "parallelism_config:\n  parallelism_config_dp_shard_size: 4\n"
    )
    mine, other = our_load(str(file)), their_load(str(file))
    assert (mine.fsdp_config, mine.distributed_type.value) == (other.fsdp_config, other.distributed_type.value)
    assert mine.parallelism_config == other.parallelism_config
    for suffix in ("yaml", "json"):
        again = tmp_path / f"again.{suffix}"
        getattr(mine, f"to_{suffix}_file")(again)
        assert our_load(again) == mine
    assert json.loads(again.read_text())["num_processes"] == 4
