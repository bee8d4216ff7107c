# SPDX-License-Identifier: Apache-2.0
"""Wrong uses of the Python API: each is refused where the user made it, by one of our errors, in one or two sentences.

A row is what a script does wrong, with `k` for what it has at hand, and the words that the error must have: the
argument as the user wrote it and the value seen. Python's own TypeError counts only where Python checks a signature.
"""

# ruff: noqa: F401  (the rows, which are texts, use what is imported)

import math
import re
from dataclasses import replace
from functools import cached_property

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

import farflung
from farflung import Accelerator, outer, utils
from farflung.base.errors import FarflungError
from farflung.comm.group import SoloGroup
from farflung.data_loader import prepare_data_loader
from farflung.logging import get_logger
from farflung.outer import OuterLoop, diloco, local_sgd
from farflung.outer.membership import FixedMembership
from farflung.state import AcceleratorState, GradientState
from farflung.testing.sim import run_replicas
from farflung.testing.simulate import simulate

NAN, INF = math.nan, math.inf
# What rows may name in addition.
NAMES = {**vars(utils), **vars(outer), **{name: getattr(farflung, name) for name in farflung.__all__}}


class Kit:
    """What a script has at hand."""

    def __init__(self, folder):
        self.folder = folder
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scheduler = LambdaLR(self.optimizer, lambda step: 1.0)
        self.loader = DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2)

    @cached_property
    def accelerator(self):
        return Accelerator(cpu=True)

    @cached_property
    def ready(self):
        self.accelerator.prepare(self.model, self.optimizer, self.loader, self.scheduler)
        return self.accelerator

    @property
    def loss(self):
        return self.model(torch.ones(2, 2)).mean()

    @cached_property
    def loop(self):
        return OuterLoop(self.model, diloco(every=2))

    @property
    def ended(self):
        self.loop.close()
        return self.loop


def entered(context):
    with context as value:
        return value


def run(make, **options):
    data = [torch.ones(2, 2)]
    given = {"replicas": 2, "steps": 2, "loss": lambda model, batch: model(batch).mean(), **options}
    return simulate(make, lambda rank: data, given.pop("recipe", local_sgd(1)), **given)


def net():
    return nn.Linear(2, 1)


# What is given to `Accelerator`.
ACCELERATOR = [
    ('dataloader_config={"split_batches": True}', "dataloader_config", "split_batches", "DataLoaderConfiguration("),
    ('project_config="dir"', "project_config", "'dir'", "ProjectConfiguration("),
    ("project_dir=5", "project_dir", "5"),
    ('rng_types=["generater"]', "rng_types", "generater", "`generator`"),
    ('rng_types="generator"', "rng_types", "'generator'", "['generator']"),
    ("kwargs_handlers=AutocastKwargs()", "kwargs_handlers", "[AutocastKwargs("),
    ("kwargs_handlers=[AutocastKwargs]", "kwargs_handlers", "AutocastKwargs()"),
    ('mixed_precision="bf61"', "mixed_precision", "'bf61'", "bf16"),
    ("mixed_precision=torch.bfloat16", "mixed_precision", "torch.bfloat16"),
    ("gradient_accumulation_steps=0", "gradient_accumulation_steps", "0"),
    ("gradient_accumulation_plugin=4", "gradient_accumulation_plugin", "4", "GradientAccumulationPlugin("),
    ("True, None, None, 2, gradient_accumulation_plugin=GradientAccumulationPlugin(3)", "accumulation_steps=2", "=3"),
    ('split_batches="no"', "split_batches", "'no'"),
    ("split_batches=True, dataloader_config=DataLoaderConfiguration()", "split_batches", "DataLoaderConfiguration"),
    ('device_placement="cuda"', "device_placement", "'cuda'"),
    ('cpu="false"', "cpu", "'false'"),
    ('step_scheduler_with_optimizer="no"', "step_scheduler_with_optimizer", "'no'"),
    ('dynamo_backend="inductr"', "dynamo_backend", "'inductr'", "`inductor`"),
    ('dynamo_plugin={"backend": "eager"}', "dynamo_plugin", "TorchDynamoPlugin("),
    ('dynamo_plugin=TorchDynamoPlugin(), dynamo_backend="eager"', "dynamo_plugin", "'eager'"),
    ("deepspeed_plugin=object()", "deepspeed_plugin", "DeepSpeed"),
    ("fsdp_plugin=5", "fsdp_plugin is 5", "FullyShardedDataParallelPlugin"),
    ('log_with="wandbb"', "log_with", "'wandbb'", "`wandb`"),
    ('log_with="jsonl"', "jsonl", "logging_dir", "project_dir"),
    ("log_with=3", "log_with", "3", "tensorboard"),
    ('scheduler_ticks="per_updates"', "scheduler_ticks", "'per_updates'", "`per_update`"),
    ('outer="dilico"', "outer is 'dilico'", "`diloco`"),
    ("outer=5", "outer", "5", "OuterConfig("),
    ('outer={"recipe": "diloco"}', "outer", "OuterConfig("),
    ("outer=slowmo", "outer", "'slowmo'"),
    ('outer=""', "outer", "''"),
    ('mixed_percision="bf16"', "mixed_percision"),
    ('mixed_precision="fp8"', "fp8", "bf16"),
    ('mixed_precision="bf16", kwargs_handlers=[AORecipeKwargs()]', "AORecipeKwargs", "mixed_precision='fp8'"),
    ("megatron_lm_plugin=object()", "Megatron-LM"),
    ("parallelism_config=ParallelismConfig(sp_size=2)", "sp_size=2"),
    (
        "parallelism_config=ParallelismConfig(cp_handler=TorchContextParallelConfig())",
        "cp_handler is read only with a cp_size above 1",
    ),
    ('dynamo_plugin=TorchDynamoPlugin("eager"), dynamo_backend="eager"', "both"),
    ("kwargs_handlers=[AutocastKwargs()] * 2", "kwargs_handlers", "two AutocastKwargs"),
]

PREPARE = [
    ('(k.accelerator, Accelerator(mixed_precision="bf16"))', "mixed_precision", "'bf16'", "'no'"),
    ('setattr(k.accelerator, "gradient_accumulation_steps", 0)', "gradient_accumulation_steps", "0"),
    ("AORecipeKwargs(config=object(), pad_inner_dim=True)", "both"),
    ("AORecipeKwargs(enable_fsdp_float8_all_gather=True)", "FSDP"),
    ("k.accelerator.prepare(nn.Linear)", "prepare", "Linear", "instance"),
    ("k.accelerator.prepare([k.model, k.optimizer])", "prepare", "list", "*"),
    ("k.accelerator.prepare((k.model, k.optimizer))", "prepare", "tuple", "*"),
    ('k.accelerator.prepare({"model": k.model})', "prepare", "dict"),
    ("k.accelerator.prepare(k.loader.dataset)", "prepare", "TensorDataset", "DataLoader"),
    ("k.accelerator.prepare(k.model, k.optimizer, device_placement=[True])", "prepare", "device_placement"),
    ("k.accelerator.prepare(k.model, device_placement=True)", "device_placement", "True", "[True]"),
    ('k.accelerator.prepare(k.model, device_placement=["cuda"])', "device_placement", "'cuda'"),
    ("k.accelerator.prepare_model(None)", "prepare_model", "None", "nn.Module"),
    ("k.accelerator.prepare_optimizer(k.model)", "prepare_optimizer", "Linear"),
    ("k.accelerator.prepare_scheduler(5)", "prepare_scheduler", "5"),
    ("k.accelerator.prepare_scheduler(lambda step: 1.0)", "prepare_scheduler", "function"),
    ("k.accelerator.prepare_data_loader([1, 2])", "prepare_data_loader", "[1, 2]", "DataLoader"),
    ("skip_first_batches(None)", "skip_first_batches", "None", "DataLoader"),
    ("k.accelerator.skip_first_batches(None, 2)", "skip_first_batches", "None"),
    ("skip_first_batches(k.loader, -1)", "num_batches", "-1"),
    ("prepare_data_loader(None)", "prepare_data_loader", "None"),
    ("prepare_data_loader(k.loader, num_processes=2, process_index=2)", "process_index", "2"),
    ("prepare_data_loader(k.loader, num_processes=0)", "num_processes", "0"),
    ("k.accelerator.unwrap_model(None)", "unwrap_model", "None", "nn.Module"),
    ("utils.extract_model_from_parallel(5)", "extract_model_from_parallel", "5"),
]

LOOP = [
    ("k.accelerator.accumulate(5)", "accumulate", "5", "accumulate(model)"),
    ("k.accelerator.accumulate(nn.Linear)", "accumulate", "Linear"),
    ("entered(k.accelerator.accumulate(k.model, 5))", "accumulate", "5"),
    ("k.accelerator.no_sync(None)", "no_sync", "None"),
    ('k.accelerator.autocast("bf16")', "autocast_handler", "'bf16'", "AutocastKwargs("),
    ("k.ready.backward(5)", "backward", "5", "tensor"),
    ("k.ready.backward(torch.tensor(1.0))", "backward", "requires_grad"),
    ("k.ready.backward(k.model(torch.ones(2, 2)))", "backward", "[2, 1]", "mean()"),
    ("k.ready.backward(torch.tensor(3))", "backward", "int64"),
    ("[k.ready.backward(loss) for loss in [k.loss] * 2]", "backward", "retain_graph"),
    ("k.ready.backward(k.loss, retain=True)", "retain"),
    ("k.ready.backward(k.loss, num_items=-1)", "num_items", "-1"),
    ("k.ready.backward(k.loss, num_items=NAN)", "num_items", "nan"),
    ("k.ready.backward(k.loss, num_items=torch.ones(3))", "num_items", "[3]", "sum()"),
    ("k.ready.backward(k.loss, num_items=True)", "num_items", "True"),
    ("k.ready.backward(k.model(torch.ones(2, 2)), num_items=2)", "backward", "[2, 1]", "sum()"),
    ("k.ready.clip_grad_norm_(None, 1.0)", "clip_grad_norm_", "None", "model.parameters()"),
    ('k.ready.clip_grad_norm_(["weight"], 1.0)', "clip_grad_norm_", "'weight'"),
    ("k.ready.clip_grad_norm_(k.model.named_parameters(), 1.0)", "clip_grad_norm_", "tuple", "model.parameters()"),
    ("k.ready.clip_grad_norm_(k.model.parameters(), -1.0)", "max_norm", "-1.0"),
    ('(k.ready.backward(k.loss), k.ready.clip_grad_norm_(k.model.parameters(), 1.0, "two"))', "norm_type", "'two'"),
    ("k.ready.clip_grad_value_(None, 1.0)", "clip_grad_value_", "None"),
    ("k.ready.clip_grad_value_(k.model.parameters(), -1.0)", "clip_value", "-1.0"),
    ("k.ready.unscale_gradients(k.model)", "unscale_gradients", "Linear"),
    ("entered(k.ready.join_uneven_inputs(k.model))", "join_uneven_inputs", "Linear", "["),
    ("entered(k.ready.join_uneven_inputs([5]))", "join_uneven_inputs", "5"),
    ('entered(k.accelerator.profile({"with_stack": True}))', "profile_handler", "ProfileKwargs("),
    ("LocalSGD(accelerator=None, model=k.model, local_sgd_steps=2)", "accelerator", "None"),
]

PROCESSES = [
    ("utils.gather(None)", "gather", "None"),
    ("k.accelerator.gather(5)", "gather", "5"),
    ('k.accelerator.gather({"x": torch.ones(2), "y": "two"})', "gather", "'two'", "gather_object"),
    ("k.accelerator.gather_for_metrics()", "input_data"),
    ("k.accelerator.gather_for_metrics(None)", "gather_for_metrics", "None"),
    ('utils.gather_object({"a": 1})', "gather_object", "dict", "list"),
    ("utils.reduce(None)", "reduce", "None"),
    ("k.accelerator.reduce(3.0)", "reduce", "3.0"),
    ('k.accelerator.reduce(torch.ones(2), "avrage")', "reduction", "'avrage'", "mean"),
    ('k.accelerator.reduce(torch.ones(2), ["sum"])', "reduction", "['sum']"),
    ('k.accelerator.reduce(torch.ones(2), "sum", "two")', "scale", "'two'"),
    ('k.accelerator.reduce(torch.ones(2), "sum", NAN)', "scale", "nan"),
    ('k.accelerator.reduce(torch.tensor([True]), "sum")', "reduce", "bool", "max"),
    ("utils.broadcast(None)", "broadcast", "None"),
    ("utils.broadcast(5)", "broadcast", "5", "broadcast_object_list"),
    ("utils.broadcast(torch.ones(2), from_process=3)", "from_process", "3"),
    ("utils.broadcast(torch.ones(2), from_process=-1)", "from_process", "-1"),
    ("utils.broadcast_object_list(None)", "broadcast_object_list", "None"),
    ("utils.broadcast_object_list((1, 2))", "broadcast_object_list", "(1, 2)", "list"),
    ("utils.broadcast_object_list([1], from_process=9)", "from_process", "9"),
    ('utils.pad_across_processes("x")', "pad_across_processes", "'x'"),
    ('utils.pad_across_processes(torch.ones(2), dim="0")', "dim", "'0'"),
    ("utils.pad_across_processes(torch.tensor([1]), pad_index=0.5)", "pad_index", "0.5"),
    ('utils.pad_across_processes(torch.ones(1), pad_index="a")', "pad_index", "'a'"),
    ("utils.concatenate([])", "concatenate", "[]"),
    ('utils.concatenate([{"a": "first"}, {"a": "x"}])', "concatenate", "'first'; it must be a tensor"),
    ('utils.concatenate([{"a": torch.ones(1)}, [torch.ones(1)]])', "concatenate", "structures"),
    ("utils.concatenate([torch.ones(1, 2), torch.ones(1, 3)])", "concatenate", "[1, 3]"),
    ("utils.concatenate([torch.ones(1)] * 2, dim=3)", "concatenate", "3"),
    ('utils.send_to_device(torch.ones(1), "gpu")', "device", "'gpu'"),
    ("utils.send_to_device(torch.ones(1), None)", "device", "None"),
    ("utils.slice_tensors(torch.ones(3), 2)", "tensor_slice", "2", "slice("),
    ("utils.recursively_apply(None, torch.ones(2))", "func", "None"),
    ('utils.recursively_apply(torch.neg, "x", error_on_other_type=True)', "neg", "'x'"),
    ('utils.compare_versions("torch", "=>", "2.0")', "operation", "'=>'", ">="),
    ('utils.is_torch_version("2.0", ">=")', "operation", "'2.0'"),
    ('utils.is_torch_version(">=", None)', "version", "None"),
    ("set_seed(-1)", "seed", "-1"),
    ("set_seed(2**40)", "seed", str(2**40)),
    ("set_seed(1, device_specific=True)", "Accelerator()"),
    ('(k.accelerator, synchronize_rng_states(["torsh"]))', "rng_types", "'torsh'", "`torch`"),
    ('(k.accelerator, synchronize_rng_states("torch"))', "rng_types", "'torch'", "["),
    ("(k.accelerator, utils.synchronize_rng_state(None))", "rng_type", "None"),
    ('(k.accelerator, utils.synchronize_rng_state("generator"))', "generator", "generator="),
    ('(k.accelerator, utils.synchronize_rng_state("generator", 5))', "generator", "5"),
    ('(k.accelerator, utils.synchronize_rng_state("npu"))', "npu"),
    ('synchronize_rng_states(["torch"])', "Accelerator()"),
    ("k.accelerator.on_process(print)", "process_index", "None"),
    ("k.accelerator.on_local_process(print, local_process_index=-1)", "local_process_index", "-1"),
    ("k.accelerator.on_main_process(5)", "on_main_process", "5"),
    ('k.accelerator.on_last_process("f")', "on_last_process", "'f'"),
    ('PartialState(backed="gloo")', "backed", "`backend`"),
    ('PartialState(cpu="no")', "cpu", "'no'"),
    ("PartialState(timeout=30)", "timeout", "30", "timedelta"),
    ('AcceleratorState(mixed_precision="fp61")', "mixed_precision", "'fp61'"),
    ("(PartialState(cpu=True), AcceleratorState._reset_state(), GradientState().num_steps)", "Accelerator()"),
    ("(k.accelerator, GradientState(5))", "gradient_accumulation_plugin", "5"),
    ("PartialState().destroy_process_group(5)", "group", "5"),
    ('get_logger("x", log_level="loud")', "log_level", "'loud'", "info"),
    ('get_logger("x").warning("hello")', "Accelerator"),
    ("notebook_launcher(None)", "function", "None"),
    ("notebook_launcher(print, num_processes=0)", "num_processes", "0"),
    ("notebook_launcher(print, 5, num_processes=2)", "args", "5", "(5,)"),
    ('notebook_launcher(print, "ab")', "args", "'ab'", "('ab',)"),
    ("notebook_launcher(print, use_port=70000, num_processes=2)", "use_port", "70000"),
    ('notebook_launcher(print, mixed_precision="fp17")', "mixed_precision", "fp17"),
    ("notebook_launcher(print, num_processes=2, node_rank=2, num_nodes=2)", "node_rank", "2"),
    ("notebook_launcher(print, num_processes=2, max_restarts=-1)", "max_restarts", "-1"),
    ("notebook_launcher(print, num_processes=2, monitor_interval=0)", "monitor_interval", "0"),
    ("(k.accelerator, notebook_launcher(print, num_processes=2))", "rank 0 of 1"),
    ("debug_launcher(5)", "function", "5"),
    ("debug_launcher(print, num_processes=-2)", "num_processes", "-2"),
    ("debug_launcher(print, args=3)", "args", "3"),
]

SETTINGS = [
    ('DataLoaderConfiguration(split_batches="yes")', "split_batches", "'yes'"),
    ("DataLoaderConfiguration(even_batches=None)", "even_batches", "None"),
    ("DataLoaderConfiguration(data_seed=3)", "data_seed", "3"),
    ('DataLoaderConfiguration(data_seed="3", use_seedable_sampler=True)', "data_seed", "'3'"),
    ('DataLoaderConfiguration(use_stateful_dataloader="yes")', "use_stateful_dataloader", "True or False"),
    ("DataLoaderConfiguration(batch_size=3)", "batch_size"),
    ("ProjectConfiguration(total_limit=0)", "total_limit", "0"),
    ("ProjectConfiguration(iteration=-2)", "iteration", "-2"),
    ("ProjectConfiguration(project_dir=5)", "project_dir", "5"),
    ('ProjectConfiguration(automatic_checkpoint_naming="yes")', "automatic_checkpoint_naming", "'yes'"),
    ('ProjectConfiguration(logging_dir=["a"])', "logging_dir", "['a']"),
    ("GradientAccumulationPlugin(num_steps=0)", "num_steps", "0"),
    ('GradientAccumulationPlugin(sync_each_batch="no")', "sync_each_batch", "'no'"),
    ('AutocastKwargs(enabled="no")', "enabled", "'no'"),
    ("GradScalerKwargs(init_scale=0)", "init_scale", "0"),
    ("GradScalerKwargs(growth_factor=0.5)", "growth_factor", "0.5"),
    ("GradScalerKwargs(backoff_factor=2.0)", "backoff_factor", "2.0"),
    ("GradScalerKwargs(growth_interval=0)", "growth_interval", "0"),
    ("Accelerator(kwargs_handlers=[GradScalerKwargs()])", "GradScalerKwargs", "'no'"),
    ("DistributedDataParallelKwargs(bucket_cap_mb=-1)", "bucket_cap_mb", "-1"),
    ('DistributedDataParallelKwargs(comm_hook="bf61")', "comm_hook", "'bf61'", "`bf16`"),
    ('DistributedDataParallelKwargs(comm_wrapper="fp8")', "comm_wrapper", "fp8"),
    ('DistributedDataParallelKwargs(comm_hook="batched_power_sgd")', "batched_power_sgd", "Use power_sgd"),
    ('DistributedDataParallelKwargs(comm_wrapper="fp16")', "comm_wrapper", "power_sgd"),
    ('DistributedDataParallelKwargs(comm_hook="power_sgd", comm_state_option=5)', "comm_state_option", "5"),
    ('DistributedDataParallelKwargs(find_unused_parameters="true")', "find_unused_parameters", "'true'"),
    ("InitProcessGroupKwargs(timeout=30)", "timeout", "30", "timedelta(seconds=30)"),
    ("InitProcessGroupKwargs(backend=5)", "backend", "5"),
    ('Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="glo")])', "backend", "'glo'", "`gloo`"),
    ("WatchdogKwargs(timeout_s=0)", "timeout_s", "0"),
    ('ProfileKwargs(activities=["gpu"])', "activities", "'gpu'", "cuda"),
    ('ProfileKwargs(activities="cpu")', "activities", "'cpu'", "['cpu']"),
    ('ProfileKwargs(schedule_option={"wat": 1})', "schedule_option", "'wat'", "`wait`"),
    ('ProfileKwargs(schedule_option="1,2")', "schedule_option", "'1,2'"),
    ("ProfileKwargs(on_trace_ready=5)", "on_trace_ready", "5"),
    ("ProfileKwargs(output_trace_dir=5)", "output_trace_dir", "5"),
    ('TorchDynamoPlugin(backend="inducter")', "backend", "'inducter'", "`inductor`"),
    ('TorchDynamoPlugin(backend="eager", mode="fast")', "mode", "'fast'", "default"),
    ("TorchDynamoPlugin(fullgraph=True)", "fullgraph", "backend"),
    ('TorchDynamoPlugin(backend="eager", fullgraph="no")', "fullgraph", "'no'"),
    ('TorchDynamoPlugin(backend="inductor", options=5)', "options", "5"),
    ('TorchDynamoPlugin(backend="inductor", mode="max-autotune", options={"a": 1})', "not both"),
    ("TorchDynamoPlugin(use_regional_compilation=True)", "need a backend"),
    ("DataLoaderConfiguration(already_sharded=True, split_batches=True)", "already_sharded=True", "and split_batches"),
    ("DataLoaderConfiguration(already_sharded=True, dispatch_batches=True)", "reads, and dispatch_batches=True"),
]

CHECKPOINTS = [
    ("k.ready.save_state()", "save_state", "automatic_checkpoint_naming"),
    ("k.ready.save_state(5)", "output_dir", "5"),
    ('k.ready.save_state(k.folder / "a", busy="later")', "busy", "'later'", "wait"),
    ('k.ready.save_state(k.folder / "a", max_shard_size=5)', "max_shard_size"),
    ('k.ready.load_state(k.folder / "nothing")', "nothing"),
    ("k.ready.load_state(5)", "input_dir", "5"),
    ("k.ready.load_state()", "load_state", "automatic_checkpoint_naming"),
    ('k.ready.load_state(k.folder, load_kwargs="x")', "load_kwargs", "'x'"),
    ("k.ready.load_state(k.folder, mmap=True)", "mmap"),
    ("k.accelerator.register_for_checkpointing(5)", "register_for_checkpointing", "int", "state_dict"),
    ("k.accelerator.register_for_checkpointing(nn.Linear)", "register_for_checkpointing", "Linear"),
    ("k.accelerator.register_save_state_pre_hook(None)", "hook", "None"),
    ("k.accelerator.register_load_state_pre_hook(5)", "hook", "5"),
    ("k.accelerator.save_model(None, k.folder)", "save_model", "None"),
    ("k.accelerator.save_model(k.model, 5)", "save_directory", "5"),
    ('k.accelerator.save_model(k.model, k.folder, max_shard_size="10 apples")', "max_shard_size", "10 apples"),
    ("k.accelerator.save_model(k.model, k.folder, max_shard_size=-1)", "max_shard_size", "-1"),
    ('k.accelerator.save("x.pt", {"a": 1})', "f", "{'a': 1}"),
    ('k.accelerator.save({"a": 1}, k.folder / "x", safe_serialization=True)', "safe_serialization"),
    ("k.accelerator.get_state_dict(None)", "get_state_dict", "None"),
]

OUTER = [
    ("LocalSGD(accelerator=k.ready, model=None, local_sgd_steps=2)", "model", "None"),
    ("LocalSGD(accelerator=k.ready, model=k.model, local_sgd_steps=0)", "local_sgd_steps", "0"),
    ('LocalSGD(accelerator=k.ready, model=k.model, local_sgd_steps=2, enabled="no")', "enabled", "'no'"),
    ("k.ready.outer(k.model, None)", "recipe", "None"),
    ('k.ready.outer(k.model, "dilico")', "recipe", "'dilico'", "`diloco`"),
    ("k.ready.outer(k.model, slowmo)", "recipe", "slowmo(", "function"),
    ("k.ready.outer(k.model, 32)", "recipe", "32"),
    ("k.ready.outer(diloco(4), k.model)", "model", "recipe"),
    ("k.ready.outer(None, diloco(4))", "model", "None"),
    ("k.accelerator.outer(k.model, diloco(4))", "prepare"),
    ("entered_twice(k)", "already has an outer loop"),
    ("OuterLoop(k.model, None)", "recipe", "None", "diloco("),
    ("OuterLoop(diloco(4), k.model)", "model", "recipe"),
    ("OuterLoop(None, diloco(4))", "model", "None"),
    ('OuterLoop(k.model, "localsgd")', "recipe", "'localsgd'", "`local_sgd`"),
    ("OuterLoop(k.model, diloco(4), group=5)", "group", "5", "TorchGroup"),
    ("OuterLoop(k.model, diloco(4), island=5)", "island is 5", "TorchGroup"),
    ('OuterLoop(k.model, diloco(4), membership="all")', "membership is 'all'"),
    ("OuterLoop(k.model, diloco(4), SoloGroup(), membership=alone())", "takes no group and no island with it"),
    ("OuterLoop(k.model, diloco(4), island=SoloGroup(), membership=alone())", "takes no group and no island with it"),
    ('OuterLoop(k.model, diloco(4), outer="replica")', "mesh is None", "DeviceMesh"),
    ("OuterLoop(k.model, diloco(4), inner=k.model)", "inner", "Linear"),
    ("OuterLoop(k.model, diloco(4), bucket_bytes=0)", "bucket_bytes", "0"),
    ("OuterLoop(k.model, diloco(4), clock=5)", "clock", "5"),
    ("OuterLoop(nn.Identity(), diloco(4))", "model", "Identity"),
    ("OuterLoop(net(), replace(diloco(4), optimizer=in_two_groups))", "outer optimizer", "one parameter group"),
    ("k.loop.attach(5)", "attach", "5"),
    ("k.loop.attach(k.optimizer, torch.optim.SGD(net().parameters(), lr=0.1))", "attach", "no parameter"),
    ("k.ended.attach(k.optimizer)", "ended"),
    ("k.loop.attach(k.optimizer).attach(k.optimizer)", "attach", "already"),
    ("k.loop.attach(k.optimizer, k.optimizer)", "attach", "twice"),
    ("k.ended.step()", "ended"),
    ("k.ended.sync_if_due()", "ended"),
    ("k.ended.count()", "ended"),
    ("k.ended.flush()", "ended"),
    ("entered(k.ended.synced())", "ended"),
    ("k.ended.reset_anchor()", "ended"),
    ("k.ended.change_schedule(8)", "ended"),
    ("k.ended.load_state_dict(k.loop.state_dict())", "ended"),
    ("k.ended.average_gradients()", "ended"),
    ("entered(k.ended)", "ended"),
    ("k.loop.load_state_dict({})", "load_state_dict", "{}"),
    ("k.loop.load_state_dict(None)", "load_state_dict", "None"),
    ("k.loop.load_state_dict(k.model.state_dict())", "load_state_dict", "weight"),
    ('k.loop.load_state_dict({"description": k.loop.state_dict()["description"]})', "load_state_dict", "rounds"),
    ('k.loop.step(items="3")', "items", "'3'"),
    ('OuterLoop(k.model, replaced(weigh_by="items")).step(items=-1)', "items", "-1"),
    ('OuterLoop(k.model, replaced(weigh_by="items")).step()', "items", "0", "how many"),
    ('OuterLoop(k.model, replaced(weigh_by="items")).step(items=torch.ones(3))', "items"),
    ('OuterLoop(k.model, replaced(weigh_by="items")).attach(k.optimizer)', "attach", "step(items=n)"),
    ("merge_states([])", "merge_states", "[]"),
    ("merge_states(k.loop.state_dict())", "merge_states", "list"),
]


def in_two_groups(parameters):
    return torch.optim.SGD([{"params": parameters}, {"params": [nn.Parameter(torch.ones(1))]}], lr=0.1)


def alone():
    return FixedMembership(SoloGroup(), SoloGroup())


def entered_twice(kit):
    with kit.ready.outer(kit.model, diloco(4)), kit.accelerator.outer(kit.model, diloco(4)):
        pass


class Unsummed(outer.Cast):
    linear = False


def replaced(**parts):
    return replace(diloco(2), **parts)


RECIPES = [
    ("diloco(every=0)", "every", "0"),
    ("local_sgd(-1)", "every", "-1"),
    ("slowmo(8.5)", "every", "8.5"),
    ("gossip(None)", "every", "None"),
    ("eager_diloco(INF)", "every", "inf"),
    ("noloco(True)", "every", "True"),
    ("sparse_loco([30])", "every", "[30]"),
    ("diloco(8, lr=0)", "lr", "0"),
    ("noloco(8, lr=-0.1)", "lr", "-0.1"),
    ("noloco(8, pull=1.5)", "pull", "1.5"),
    ('noloco(8, codec="bf16")', "Cast", "pull=0"),
    ("sparse_loco(lr=None)", "lr", "None"),
    ("diloco(8, momentum=1.0)", "momentum", "1.0"),
    ("diloco(8, momentum=-0.1)", "momentum", "-0.1"),
    ("edit(8, momentum=None)", "momentum", "None"),
    ('diloco(8, nesterov="no")', "nesterov", "'no'"),
    ("diloco(8, rounds=0)", "rounds", "0"),
    ('diloco(8, codec="int9")', "codec", "'int9'", "`int8`"),
    ("diloco(8, codec=Int8)", "codec", "Int8()"),
    ("local_sgd(8, codec=torch.bfloat16)", "codec", "torch.bfloat16", "bf16"),
    ("slowmo(8, alpha=0)", "alpha", "0"),
    ("streaming_diloco(8, 2, alpha=1.5)", "alpha", "1.5"),
    ("slowmo(8, beta=1.0)", "beta", "1.0"),
    ("sparse_loco(beta=0)", "beta", "0"),
    ("post_local_sgd(-1, 8)", "warmup", "-1"),
    ("post_local_sgd(10, 0)", "every", "0"),
    ("hierarchical(None)", "levels", "None", "{4: 8, 64: None}"),
    ("hierarchical({})", "levels", "{}"),
    ("hierarchical({4: 1, 64: None})", "levels", "4: 1"),
    ('hierarchical({4: "eight", 64: None})', "levels", "'eight'"),
    ('hierarchical({"4": 8, 64: None})', "levels", "'4'"),
    ("streaming_diloco(4, 8)", "fragments", "8", "every=4"),
    ("streaming_diloco(8, 0)", "fragments", "0"),
    ("streaming_diloco(8, 2, delay=-1)", "delay", "-1"),
    ("streaming_diloco(8, 2, delay=9)", "delay", "9"),
    ("streaming_diloco(8, 2, cut=2)", "cut", "2"),
    ('streaming_diloco(8, 2, cut="strided")', "cut", "'strided'"),
    ("edit(8, seconds=3.0)", "every", "8", "seconds", "3.0"),
    ("edit(seconds=0)", "seconds", "0"),
    ("diloco(seconds=0)", "seconds", "0"),
    ("edit(8, threshold=0)", "threshold", "0"),
    ("diloco(8, learning_rate=0.7)", "learning_rate"),
    ("ByTime(INF)", "seconds", "inf"),
    ("Quadratic(8, 0.1, max_every=4)", "max_every", "4"),
    ("Warmup(8, 8)", "then", "8", "Every("),
    ("Levels(None)", "sizes", "None"),
    ("Cast(torch.float16)", "dtype", "torch.float16", "fp16"),
    ("Int8(block=7)", "block", "7"),
    ("Int4(block=0)", "block", "0"),
    ("TopK(k=0)", "k", "0"),
    ("TopK(k=5000)", "k", "5000"),
    ("TopK(chunk=1)", "chunk", "1"),
    ("TopK(bits=4)", "bits", "4"),
    ("ErrorFeedback(None)", "codec", "None"),
    ('ErrorFeedback("int3")', "codec", "'int3'"),
    ("ErrorFeedback(ErrorFeedback(TopK()))", "ErrorFeedback"),
    ("ErrorFeedback(TopK(), beta=1.5)", "beta", "1.5"),
    ("local_sgd(8, codec=ErrorFeedback(TopK()))", "ErrorFeedback", "anchor"),
    ("Blend(alpha=-1)", "alpha", "-1"),
    ("TrimmedMean(0)", "trim", "0"),
    ("WithoutOutliers(decay=1.0)", "decay", "1.0"),
    ("WithoutOutliers(decay=0)", "decay", "0"),
    ("WithoutOutliers(patience=0)", "patience", "0"),
    ('AverageState({"exp_avg": 0})', "exp_avg", "0"),
    ("AverageState(3)", "every", "3"),
    ("strided(nn.Sequential(net(), net()), 3)", "3 fragments of 2 blocks", "itself", "by_bytes"),
    ("by_bytes(net(), 3)", "3 fragments", "1 of them"),
    ("strided(None, 2)", "model", "None"),
    ("by_bytes(net(), 0)", "count", "0"),
    ("blocks([net()], 1)", "model", "list"),
    ("whole(net(), 2)", "2", "strided"),
    ("apart(None)", "cut", "None"),
    ("apart(by_bytes, kind=net())", "kind", "Linear"),
    ("apart(by_bytes)(net(), 2)", "apart(Embedding)"),
    ("apart(by_bytes, nn.Linear)(net(), 1)", "apart(Linear)", "not 1"),
    ("Recipe(8)", "schedule", "8", "Every("),
    ("replaced(codec=5)", "codec", "5"),
    ('replaced(aggregator="mean")', "aggregator", "'mean'", "Mean()"),
    ("replaced(policy=None)", "policy", "None", "a Policy of farflung.methods.weighting"),
    ('replaced(weigh_by="tokens")', "weigh_by", "'tokens'", "items"),
    ('replaced(weigh_by="items", policy=WithoutOutliers())', "weigh_by", "'items'", "WithoutOutliers(", "diloco"),
    ('robust(replaced(weigh_by="items"), "trimmed")', "weigh_by", "'items'", "TrimmedMean("),
    ('replaced(optimizer="adam")', "optimizer", "'adam'"),
    ("replaced(optimizer=k.optimizer)", "optimizer", "SGD", "functools.partial"),
    ("replaced(merge=0.5)", "merge", "0.5", "Blend("),
    ("replaced(fragments=2)", "fragments", "2"),
    ('replaced(anchor_on_cpu="yes")', "anchor_on_cpu", "'yes'"),
    ('replaced(same_data="yes")', "same_data", "'yes'"),
    ("replaced(inner=5)", "inner", "5", "AverageState()"),
    ("replaced(changes=Change(8, 8))", "changes", "Change(step=640"),
    ("replaced(changes=(Change(4, 4), Change(6, 8)))", "is within a round: from step 4 on they have 4", "step=8"),
    ("replaced(changes=(Change(4, 4), Change(4, 8)))", "is within a round", "step=8"),
    ("Change(8, 0)", "every is 0"),
    ("replaced(changes=(Change(8, 8, 1),))", "delay is 1", "began without one"),
    ("replace(quadratic(2, 0.1), changes=(Change(8, 8),))", "Quadratic", "by itself"),
    ("replace(eager_diloco(4), changes=(Change(8, 8, 4),))", "a delay equal to every"),
    ("Change(0, 8)", "step", "0"),
    ("Change(8, 4, 5)", "delay is 5", "4"),
    ("k.loop.change_schedule(0)", "every", "0"),
    ("k.loop.change_schedule(8, 1)", "delay is 1", "began without one"),
    ("Recipe(Streaming(4, 1, 1))", "delay", "1"),
    ("replaced(eager=True)", "eager", "delay"),
    ('OuterConfig("slowmoo")', "'slowmoo'", "`slowmo`"),
    ("OuterConfig(None)", "recipe", "None"),
    ('OuterConfig("local_sgd", every=4, lr=0.7)', "local_sgd", "lr"),
    ('OuterConfig("quadratic", every=4)', "quadratic", "alpha"),
    ('OuterConfig("diloco", every=4, codec="int9")', "codec", "'int9'", "`int8`"),
    ('OuterConfig("diloco", every=4, weigh_by="sample")', "weigh_by", "'sample'"),
    ('OuterConfig("noloco", every=4, weigh_by="items_squared")', "weigh_by", "'items_squared'", "Gossip(pull=1.0)"),
    ('OuterConfig("diloco", every=4, inner="avarage")', "inner", "'avarage'", "`average`"),
    ('OuterConfig("hierarchical", levels=5)', "levels", "5"),
    ('OuterConfig("hierarchical", levels="4,64")', "levels", "'4,64'"),
    ("replace(local_sgd(2), schedule=Streaming(4, 1, 2))", "undo the steps"),
    ("replace(local_sgd(2), merge=Blend())", "needs an anchor"),
    ("replace(local_sgd(2), policy=WithoutOutliers())", "WithoutOutliers"),
    ("replace(local_sgd(2), policy=ClippedToMedian())", "needs the replicas' pseudo-gradients"),
    ("replace(local_sgd(2), aggregator=RadialMean())", "RadialMean", "needs the replicas' pseudo-gradients"),
    ('diloco(2, radial="no")', "radial", "'no'"),
    ("replace(eager_diloco(2), aggregator=RadialMean())", "eager replaces", "RadialMean"),
    ("replace(eager_diloco(4), schedule=Streaming(4, 1, 3))", "a delay equal to every"),
    ("replace(eager_diloco(4), codec=ErrorFeedback(Int8()))", "stale term"),
    ("replace(eager_diloco(4), aggregator=TrimmedMean())", "this rank's term in a mean"),
    ("replace(eager_diloco(4), codec=Int8(), aggregator=ReduceScatterMean())", "eager replaces", "rounds again"),
    ("GatherMean(hops=2)", "hops is 2", "ReduceScatterMean()"),
    ("diloco(4, exchange='ring')", "exchange is 'ring'", "reduce_scatter"),
    ("diloco(4, radial=True, exchange='gather')", "exchange is 'gather'", "radial=True has an exchange of its own"),
    ("robust(diloco(4, codec='int8', exchange='reduce_scatter'), 'trimmed')", "sends sums", "Leave out exchange"),
    ("replace(eager_diloco(4), aggregator=Gossip())", "eager replaces", "Gossip("),
    ("replace(hierarchical({1: 2, 3: None}), optimizer=diloco(2).optimizer)", "an anchor of its own"),
    ("replace(streaming_diloco(4, 2), inner=ResetState())", "rounds that block training"),
    ("replaced(codec=Int8())", "GatherMean"),
    ("replaced(aggregator=ReduceScatterMean())", "Mean"),
    ("replaced(codec=Unsummed(), aggregator=ReduceScatterMean())", "encodes to bytes, and Unsummed(", "GatherMean()"),
    ("replaced(bucket_bytes=0)", "bucket_bytes", "0"),
    ("gossip(2, codec=ErrorFeedback(Int8()))", "needs an anchor"),
    ("noloco(2, codec=ErrorFeedback(Int8()))", "a different peer"),
    ("replace(noloco(2), optimizer=None)", "pulls anchors together"),
    ("edit(2, max_norm=-1.0)", "max_norm", "-1.0"),
    ("edit(2, temperature=0.0)", "temperature", "0.0"),
    ("Warmup(True, Every(2))", "steps", "True"),
    ("Quadratic(0, 0.1)", "every", "0"),
    ("Quadratic(4, 0.0)", "alpha", "0.0"),
    ("Levels({4: 8, 8: 8, 64: None})", "8"),
    ("Levels({0: 8, 64: None})", "0"),
    ("TopK(chunk=2**17)", "chunk", "131072"),
    ("blocks(nn.Sequential(net(), net()), 6)", "by_bytes"),
    ("apart(strided)(nn.Sequential(net(), net()), 1)", "two fragments"),
    ("apart(strided, nn.Conv2d)(nn.Sequential(net(), net()), 2)", "Conv2d"),
    ("strided(nn.Sequential(net().requires_grad_(False), net()), 2)", "1 block that train"),
    ('muon_groups(net(), ["bodies"])', "'bodies'"),
    ('muon_groups(net(), "body")', "list of names"),
    ('OuterConfig("diloco", evry=4)', "diloco has no option evry", "`every`"),
    ('OuterConfig("local_sgd", every=4, anchor_on_cpu=True)', "anchor_on_cpu is True", "keeps no anchor"),
    ('OuterConfig("diloco", every=4, bucket_bytes=-5)', "bucket_bytes is -5", "a whole number, 1 or more"),
    ('OuterConfig("hierarchical", levels="4:2")', "levels is {4: 2}", "larger groups must average less often"),
    ('OuterConfig("hierarchical", levels={4: None, 8: 2})', "all ranks (None) least often"),
    ('OuterConfig("diloco", robust="median")', "robust", "'median'", "trimmed"),
    ('OuterConfig("auto", robust="clip")', "robust is 'clip'", "yet to be chosen"),
    ('robust(noloco(2), "trimmed")', "robust is 'trimmed'", "Gossip(pull=1.0)"),
    ('robust(eager_diloco(2), "clip")', "robust is 'clip'", "eager anchors"),
    ('robust(post_local_sgd(2), "trimmed")', "a warm-up averages gradients"),
    ('robust(hierarchical({1: 2, 3: None}), "trimmed")', "groups that may have no majority"),
    ('robust(edit(2), "clip")', "WithoutOutliers(", "a rule of its own"),
    ('robust(diloco(2, radial=True), "trimmed")', "another length. Leave out radial, or use robust=clip."),
    ('robust(sparse_loco(2), "trimmed")', "ErrorFeedback(", "sends nothing"),
    ('OuterConfig("diloco", robust="clip", inner="average")', "AverageState(", "a plain mean of optimizer states"),
    ("Screened(ByWork(), bound=1)", "bound", "1"),
    ("Screened(ByWork(), patience=0)", "patience", "0"),
    ('OuterLoop(net(), robust(diloco(2), "clip"))', "needs 3 replicas", "at most 1"),
    ('OuterConfig("diloco", steps=31)', "steps is 31", "the first round comes after 32"),
    ('OuterConfig("post_local_sgd", warmup=100, every=8, steps=107)', "after a warm-up of 100"),
    ('OuterConfig("local_sgd", steps=0)', "steps", "0"),
    ('OuterConfig("local_sgd", every=2, report="never")', "report is 'never'; use auto, round, off, or a number"),
    ('OuterConfig("local_sgd", every=2, report="0")', "report is '0'", "above zero"),
    ('OuterConfig("local_sgd", every=2, report=True)', "report is True"),
]

SIMULATE = [
    ("run(None)", "make_model", "None"),
    ("run(net())", "make_model", "Linear", "lambda"),
    ("run(lambda: 5)", "make_model", "5"),
    ("simulate(net, [1], local_sgd(1), steps=2)", "make_data", "[1]"),
    ("simulate(net, lambda rank: [], local_sgd(1), steps=2)", "make_data"),
    ("simulate(net, lambda rank: 5, local_sgd(1), steps=2)", "make_data", "5"),
    ('run(net, recipe="dilocco")', "recipe", "'dilocco'", "`diloco`"),
    ("run(net, recipe=diloco)", "recipe", "diloco("),
    ("run(net, replicas=0)", "replicas", "0"),
    ("run(net, steps=0)", "steps", "0"),
    ("run(net, evaluate_every=0)", "evaluate_every", "0"),
    ("run(net, evaluate=5)", "evaluate", "5"),
    ("run(net, step_seconds=-1.0)", "step_seconds", "-1.0"),
    ("run(net, seconds=-5)", "seconds", "-5"),
    ("run(net, lost={5: 1})", "lost", "5"),
    ("run(net, lost=[1])", "lost", "[1]"),
    ("run(net, delays={1: 1.0})", "delays", "1"),
    ("run(net, delays={(0, 1): -1.0})", "delays", "-1.0"),
    ("run(net, bandwidth_bps=0)", "bandwidth_bps", "0"),
    ("run(net, latency_s=-0.1)", "latency_s", "-0.1"),
    ("run(net, max_norm=-1.0)", "max_norm", "-1.0"),
    ('run(net, seed="0")', "seed", "'0'"),
    ("run(net, loss=5)", "loss", "5"),
    ("run(net, loss=lambda model, batch: model(batch))", "loss", "[2, 1]"),
    ("run(net, loss=lambda model, batch: 5.0)", "loss", "5.0"),
    ('run(net, make_optimizer="adamw")', "make_optimizer", "'adamw'"),
    ("run(net, make_scheduler=5)", "make_scheduler", "5"),
    ("run(net, items=3)", "items", "3"),
    ("run_replicas(print, 0)", "0"),
    ("run(net, step_seconds=(1, 2, 3))", "step_seconds has 3 values for 2 replicas"),
    ("run(net, delays={(-1, 1): 1.0})", "ranks [-1]"),
    ("run(net, recipe=Recipe(ByTime(1.0)), evaluate_every=2)", "with a schedule by time"),
]

TABLE = [(f"Accelerator({arguments})", *words) for arguments, *words in ACCELERATOR]
TABLE += [*PREPARE, *LOOP, *PROCESSES, *SETTINGS, *CHECKPOINTS, *OUTER, *RECIPES, *SIMULATE]
_SIGNATURE = re.compile(r"(unexpected keyword|missing \d+ required|takes \d+ positional|multiple values for) ?")


@pytest.mark.parametrize(("use", "words"), [pytest.param(use, words, id=use) for use, *words in TABLE])
def test_a_wrong_use_is_refused_in_one_sentence(use, words, tmp_path):
    with pytest.raises((FarflungError, TypeError)) as caught:
        eval(use, {**NAMES, **globals(), "k": Kit(tmp_path)})
    said = str(caught.value)
    if not isinstance(caught.value, FarflungError):
        assert _SIGNATURE.search(said), f"TypeError: {said}"
    assert [word for word in words if word not in said] == [], said
    assert "\n" not in said, said
    assert len(said) < 420, said
    assert " at 0x" not in said, said
    if use.startswith("Accelerator("):  # no session is left behind
        assert Accelerator(cpu=True, mixed_precision="bf16").mixed_precision == "bf16"
