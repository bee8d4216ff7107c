# SPDX-License-Identifier: Apache-2.0
"""All that Farflung takes from inside torch: names that torch does not promise to keep, and nobody else here uses.

No version of torch is asked for: a name is used if it exists, and if it does not, `Unsupported` says so.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from farflung.base.errors import Unsupported

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store as Store  # torch.distributed has no types for it

_Loader = TypeVar("_Loader", bound=DataLoader[Any])


def taken(owner: Any, name: str, use: str) -> Any:
    """Return the attribute `name` of something of torch's; raise Unsupported if this release of torch has none."""
    try:
        return getattr(owner, name)
    except AttributeError:
        what = getattr(owner, "__name__", type(owner).__name__)
        raise Unsupported(
            f"torch {torch.__version__} has no {what}.{name}, which Farflung uses to {use}. Install another release of "
            "torch, such as 2.13."
        ) from None


# ---- tensors that stand for others

# Calls functions of torch on tensors of a class with `__torch_function__` as on any tensor, for the length of a block.
without_overrides = taken(
    taken(torch, "_C", "see the data of a tensor"), "DisableTorchFunctionSubclass", "see its data"
)


# ---- many tensors in one call: 500 copies of 100 numbers take 0.25 ms, one by one 0.45 ms

foreach_add = taken(torch, "_foreach_add", "add many tensors in one call")
foreach_copy_ = taken(torch, "_foreach_copy_", "copy many tensors in one call")
foreach_div_ = taken(torch, "_foreach_div_", "divide many tensors in one call")
foreach_lerp = taken(torch, "_foreach_lerp", "blend many tensors in one call")
foreach_lerp_ = taken(torch, "_foreach_lerp_", "blend many tensors in one call")
kept_uncompiled = taken(torch, "_disable_dynamo", "keep rounds out of compiled functions")  # functions, no methods
foreach_maximum = taken(torch, "_foreach_maximum", "compare many tensors in one call")
foreach_mul_ = taken(torch, "_foreach_mul_", "scale many tensors in one call")


# ---- modules: what they hold is read in place, because names and tensors of a module may change between two rounds


def _reads(name: str, use: str) -> Callable[[Any], Any]:
    return lambda module: taken(module, name, use)


# The live dictionaries and sets of `module` itself: its parameters (`named_parameters` leaves out tied ones), buffers,
# buffers that are not part of its state dict, and children, also if one stands twice or a name stands for none.
own_parameters: Callable[[nn.Module], dict[str, Any]] = _reads("_parameters", "read a module's parameters")
own_buffers: Callable[[nn.Module], dict[str, Tensor | None]] = _reads("_buffers", "read a module's buffers")
passing_buffers: Callable[[nn.Module], set[str]] = _reads("_non_persistent_buffers_set", "leave out unsaved buffers")
child_slots: Callable[[nn.Module], dict[str, nn.Module | None]] = _reads("_modules", "copy a module")


def changes_what_it_loads(module: nn.Module) -> bool:
    """Return whether `module` has hooks of its own that change a state dict before it is loaded."""
    # Those of FSDP and of activation checkpointing change nothing that a state dict shows.
    hooks = taken(module, "_load_state_dict_pre_hooks", "check a state dict before it is loaded").values()
    return not all(getattr(hook, "__module__", "").startswith("torch.distributed.") for hook in hooks)


def copied_module(module: nn.Module, children: Mapping[str, nn.Module | None]) -> nn.Module:
    """Return a copy of `module` that is not compiled and has these children; its tensors are the same objects.

    Methods that are attributes of the module itself are the copy's.
    """
    new = nn.Module.__new__(module.__class__)  # that of a class made by fully_shard would call its constructor
    new.__dict__.update(module.__dict__)
    new.__dict__.update(_modules=dict(children), _compiled_call_impl=None)
    for name, value in module.__dict__.items():
        if isinstance(value, MethodType) and value.__self__ is module:
            new.__dict__[name] = MethodType(value.__func__, new)
    return new


# ---- compiling in place, so that names and classes stay the model's. `Module.compile` compiles nothing, and says
# nothing, if a class is torch's own, such as `Sequential`

COMPILED_FROM = "_orig_mod"  # where the module that `torch.compile(model)` returns keeps the model


def compiled_from(module: nn.Module) -> nn.Module | None:
    """Return the model inside what `torch.compile(model)` returned, None if `module` is something else."""
    return child_slots(module).get(COMPILED_FROM)


def compiled_again(compiled: nn.Module, model: nn.Module) -> nn.Module:
    """Compile `model` in the way in which `torch.compile` made `compiled`."""
    return type(compiled)(model, taken(compiled, "dynamo_ctx", "compile a model as another one was"))


def calls_compiled(module: nn.Module) -> bool:
    """Return whether calls of `module` run code that was compiled for them."""
    return taken(module, "_compiled_call_impl", "find compiled modules") is not None


def set_compiled_call(module: nn.Module, call: Any) -> None:
    """Send calls of `module` to `call`, which is made of `plain_call`."""
    calls_compiled(module)
    module._compiled_call_impl = call


def plain_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call `module`, with its hooks, past what was compiled for it."""
    return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]


def before_calls(module: nn.Module, act: Callable[..., None]) -> None:
    """Have `act(module, inputs)` called before each forward pass of `module`, also if its calls are compiled."""
    module.register_forward_pre_hook(act)
    if calls_compiled(module):
        set_compiled_call(module, partial(_called_after, act, module, module._compiled_call_impl))


def _called_after(act: Callable[..., None], module: nn.Module, call: Any, *args: Any, **kwargs: Any) -> Any:
    act(module, args)
    return call(*args, **kwargs)


def copied_loader(loader: _Loader, attributes: Mapping[str, Any]) -> _Loader:
    """Return a copy of a loader with other attributes, which torch refuses to set; nothing of it is under way."""
    other = copy.copy(loader)
    other.__dict__.update(attributes, _iterator=None, _IterableDataset_len_called=None)
    return other


def has_live_workers(loader: DataLoader[Any]) -> bool:
    """Return whether a loader keeps persistent workers from an earlier iteration."""
    return taken(loader, "_iterator", "know whether workers will draw a seed") is not None


def forget_workers(loader: DataLoader[Any]) -> None:
    """Make the next iteration of a loader start its own workers."""
    while "_iterator" not in vars(loader):  # a view has those of the loader behind it
        loader = loader.base_dataloader  # type: ignore[attr-defined]
    loader._iterator = None


def expect_batches(loader: DataLoader[Any], number: int) -> None:
    """Make torch warn when a stream has more batches than this, not than its own count, which leaves out workers."""
    loader._IterableDataset_len_called = number  # type: ignore[assignment]  # torch says None


# Methods of a tensor that ask what it is, and read no values.
ASK_OF_KIND = ("_has_compatible_shallow_copy_type", "_is_view")
MAKE_ITERATOR = ("__iter__", "_get_iterator")  # methods of a loader
NUM_YIELDED = "_num_yielded"  # of a loader's iterator: how many batches it has handed out


def is_exhausted(iterator: Any) -> bool:
    """Return whether an iterator of a loader over a stream has come to the stream's end. Others never say so."""
    return bool(getattr(getattr(iterator, "_dataset_fetcher", None), "ended", False))


# ---- the loss scaler of fp16: torch tells nobody whether a fused optimizer's step was skipped


def overflowed(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether gradients of `optimizer` overflowed in its latest step."""
    if not scaler.is_enabled():
        return False
    found_inf: dict[Any, Tensor] = taken(scaler, "_found_inf_per_device", "see overflows")(optimizer)
    return any(one.item() for one in found_inf.values())


def scaler_stages(scaler: torch.amp.GradScaler) -> dict[int, dict[str, Any]]:
    """Return the live dictionary of what a scaler knows of each optimizer (by id) since its latest `update`."""
    if not scaler.is_enabled():
        return {}  # nor has it a dictionary
    states: dict[int, dict[str, Any]] = taken(scaler, "_per_optimizer_states", "save a scaler between two updates")
    return states


def ready_scaler(scaler: torch.amp.GradScaler, device: torch.device) -> None:
    """Make the tensors that a scaler makes when it first scales a loss, unless it has them."""
    if taken(scaler, "_scale", "load a scaler between two updates") is None:
        taken(scaler, "_lazy_init_scale_growth_tracker", "load a scaler between two updates")(device)


# ---- FSDP2: gradients that wait for a later backward to reduce them are nowhere else. `unsharded_accumulated_grad` is
# where torch adds those of the next backward, if it is set


_UNREDUCED = "keep gradients that FSDP has not reduced yet"


def sharded_parameters(module: Any) -> list[Any]:
    """Return what FSDP knows of each parameter that a call of `fully_shard` on `module` itself has sharded."""
    state = taken(module, "_get_fsdp_state", _UNREDUCED)()
    groups = getattr(state, "_fsdp_param_groups", None)  # one, until torch 2.11
    groups = [taken(state, "_fsdp_param_group", _UNREDUCED)] if groups is None else groups
    return [one for group in groups if group is not None for one in taken(group, "fsdp_params", _UNREDUCED)]


def unreduced_gradient(sharded: Any) -> Tensor | None:
    """Return a parameter's whole gradient on this rank, None if there is none that was not reduced."""
    gradient: Tensor | None = taken(sharded, "unsharded_accumulated_grad", _UNREDUCED)
    whole = getattr(sharded, "_unsharded_param", None)  # there from the first forward pass on
    return whole.grad if gradient is None and whole is not None else gradient


def set_unreduced_gradient(sharded: Any, gradient: Tensor | None) -> None:
    """Put a whole gradient where FSDP reduces it after a later backward."""
    unreduced_gradient(sharded)
    sharded.unsharded_accumulated_grad = gradient
    whole = getattr(sharded, "_unsharded_param", None)
    if whole is not None:
        whole.grad = None


def sequence_of(scheduler: torch.optim.lr_scheduler.SequentialLR) -> tuple[list[Any], list[int]]:
    """Return the schedulers that follow each other, and after how many steps each of them but the first begins."""
    schedulers: list[Any] = taken(scheduler, "_schedulers", "find the end of a schedule")
    milestones: list[int] = taken(scheduler, "_milestones", "find the end of a schedule")
    return schedulers, milestones


def add_joint_axis(mesh: Any, axes: Sequence[str], name: str) -> Any:
    """Give `mesh` the axis `name`, which joins `axes` of it, and return it. A collective of all ranks of the mesh."""
    return taken(mesh[tuple(axes)], "_flatten", "join axes of a mesh")(name)


def default_store() -> Any:
    """Return the store of the default process group, through which ranks tell each other that one has left."""
    return taken(dist.distributed_c10d, "_get_default_store", "tell ranks that one has left")()


def num_collectives(group: dist.ProcessGroup) -> int:
    """Return how many collectives this rank has started in a group, with any backend: DDP's and the script's too."""
    use = "find ranks that are late"
    found = [taken(group, "_get_backend", use)(device) for device in taken(group, "_device_types", use)]
    backends = {id(backend): backend for backend in found}.values()
    return sum(int(taken(backend, "_get_sequence_number_for_group", use)()) for backend in backends)


def is_joining(ddp: nn.parallel.DistributedDataParallel) -> bool:
    """Return whether a forward pass of `ddp` tells ranks without data that this one has some, as in `join()`."""
    return bool(taken(ddp, "_join_config", "refuse uneven inputs of torch's")[0])


_SENT_FIRST = "_static_graph_delay_allreduce_enqueued"  # once the first pass of a static graph sends when it ends


def is_static_graph_unknown(ddp: nn.parallel.DistributedDataParallel) -> bool:
    """Return whether a DDP model with a static graph has yet to see it, in a first backward pass."""
    return bool(ddp.static_graph and not taken(ddp, _SENT_FIRST, "keep a static graph from sending"))


def keep_static_graph(ddp: nn.parallel.DistributedDataParallel) -> bool:
    """Keep the first backward pass of a static graph from sending; return False if none was about to."""
    sends = is_static_graph_unknown(ddp)
    if sends:
        setattr(ddp, _SENT_FIRST, True)
    return sends


def free_static_graph(ddp: nn.parallel.DistributedDataParallel) -> None:
    """Undo what `keep_static_graph` did."""
    setattr(ddp, _SENT_FIRST, False)


_GROUPS = "make groups of ranks"


def num_groups() -> int:
    """Return how many process groups this rank is in."""
    return len(taken(taken(dist.distributed_c10d, "_world", _GROUPS), "pg_names", _GROUPS))


def newest_group() -> dist.ProcessGroup:
    """Return the newest process group on this rank."""
    groups: dict[dist.ProcessGroup, str] = taken(taken(dist.distributed_c10d, "_world", _GROUPS), "pg_names", _GROUPS)
    return next(reversed(groups))


def _names_count_what_was_made() -> bool:
    """Return whether groups that some ranks make are named by how many were made, not by `num_groups` (until 2.13)."""
    world = taken(dist.distributed_c10d, "_world", _GROUPS)
    named = taken(dist.distributed_c10d, "_hash_ranks_to_str", _GROUPS)
    made = taken(world, "group_count", _GROUPS)
    before = named([])
    world.group_count = made + 1
    try:
        return bool(named([]) != before)
    finally:
        world.group_count = made


def group_serial() -> int:
    """Return the number in the name of the next group that some ranks make: those that differ in it never meet."""
    return int(dist.distributed_c10d._world.group_count) if _names_count_what_was_made() else num_groups()


def raise_group_serial(serial: int) -> None:
    """Let `group_serial` be `serial` on this rank, if it is less."""
    if _names_count_what_was_made():
        world = dist.distributed_c10d._world
        world.group_count = max(world.group_count, serial)
        return
    while num_groups() < serial:  # one that nobody uses
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)


def is_flattened(parameter: Tensor) -> bool:
    """Return whether `FullyShardedDataParallel` has put a parameter into a flat one, or this is a flat one."""
    return any(getattr(parameter, mark, False) for mark in ("_is_flat_param", "_fsdp_flattened"))


def shard_shape_and_offset(tensor: Any) -> tuple[list[int], list[int]]:
    """Return the shape of this rank's part of a DTensor, and where it begins in the whole one."""
    from torch.distributed.tensor import _utils  # here, as it is slow to import

    find = taken(_utils, "compute_local_shape_and_global_offset", "say which part of a tensor a rank keeps")
    shape, offset = find(tensor.shape, tensor.device_mesh, tensor.placements)
    return list(shape), list(offset)


def bare_group(store: Store, rank: int, size: int, timeout_s: float) -> dist.ProcessGroup:
    """Return a process group that torch's default world knows nothing of: gloo, and NCCL too if there are GPUs.

    The ranks wait for each other for `timeout_s`, or raise RuntimeError; later they do without end.
    """
    use = "make groups of replicas that come and go"
    group, kinds = dist.ProcessGroup(store, rank, size), dist.ProcessGroup.BackendType
    gloo = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_s))
    taken(gloo, "_set_default_timeout", use)(timedelta(days=30))
    taken(group, "_set_default_backend", use)(kinds.GLOO)
    group._register_backend(torch.device("cpu"), kinds.GLOO, gloo)
    if torch.cuda.is_available() and dist.is_nccl_available():
        apart = dist.PrefixStore("nccl", store)  # type: ignore[attr-defined]
        nccl = dist.ProcessGroupNCCL(apart, rank, size, dist.ProcessGroupNCCL.Options())
        group._register_backend(torch.device("cuda"), kinds.NCCL, nccl)
    return group
