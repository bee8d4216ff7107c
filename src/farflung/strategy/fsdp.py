# SPDX-License-Identifier: Apache-2.0
"""Each process holds a part of the model, and gathers the rest for as long as it computes with it: torch's FSDP2."""

from __future__ import annotations

import functools
import re
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakIdKeyDictionary

from farflung.base.enums import DistributedType
from farflung.base.errors import ConfigError, StateError, Unsupported
from farflung.base.torch_internals import own_parameters
from farflung.comm.bucket import broadcast_values
from farflung.comm.shards import is_sharded, model_has_dtensor, reshard, sharded_parts, spread_like
from farflung.config.sharding import FullyShardedDataParallelPlugin
from farflung.precision.base import wrap_forward
from farflung.process.mesh import Mesh
from farflung.strategy.base import Strategy
from farflung.strategy.sharded import ShardedModels, refuse_muon

_MARK = "_farflung_recomputed"  # on a forward pass that computes again; what wraps that takes the mark along


class OneShard(Strategy):
    """FSDP on one process, which has nothing to share: what the plugin says of activations counts nevertheless."""

    def __init__(self, mesh: Mesh, device: torch.device, plugin: FullyShardedDataParallelPlugin) -> None:
        super().__init__(mesh)
        self._plugin = plugin
        if isinstance(plugin.offload_policy, CPUOffloadPolicy) and device.type != "cpu":
            raise Unsupported("cpu_offload needs several processes. Start more of them, or leave it out.")

    def prepare(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> nn.Module:
        _recompute(model, modules_to_wrap(model, self._plugin.policy_for(model)), self._plugin)
        return model


class FSDP(ShardedModels):
    """Models sharded over this rank's row, as a plugin says; models that come sharded stay as they are."""

    kind = DistributedType.FSDP
    places = True

    def __init__(
        self,
        mesh: Mesh,  # its rows are the ranks that share one copy of a model
        device: torch.device,  # where to compute
        plugin: FullyShardedDataParallelPlugin,
        compute_dtype: torch.dtype | None = None,  # under autocast too; None: that of the weights, or the policy
    ) -> None:
        super().__init__(mesh)
        # Trainers shard models of their own by the plugin's policies.
        plugin.set_cpu_offload()
        if plugin.mixed_precision_policy is None and compute_dtype is not None:
            plugin.mixed_precision_policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
        given = None if plugin.mixed_precision_policy is None else plugin.mixed_precision_policy.param_dtype
        if None not in (given, compute_dtype) and given != compute_dtype:
            raise ConfigError(
                f"mixed_precision_policy has param_dtype={given}, but mixed_precision computes in {compute_dtype}. "
                'Give both the same dtype, or leave it to the policy: mixed_precision="no".'
            )
        self._device = device
        self._plugin = plugin
        self._compute_dtype = compute_dtype
        self._became: Any = WeakIdKeyDictionary()  # parameters from before, and the shards that took their places
        # For good: the garbage collector may come while torch goes through these hooks, when none can be removed.
        register_optimizer_step_pre_hook(functools.partial(_refuse_strange, self._became, weakref.WeakSet()))

    def prepare(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> nn.Module:
        reshard(model.modules())
        self.check_parallel(model)
        if not (sharded_parts(model.modules()) if self.mesh.cuts_layers else model_has_dtensor(model)):
            self._shard(model)
        elif self._plugin.activation_checkpointing and not any(map(_is_recomputed, model.modules())):
            raise Unsupported(
                f"This {type(model).__name__} came sharded, so its activations can't be recomputed by "
                "activation_checkpointing. Leave that out, and wrap them before fully_shard."
            )
        self.take(model)
        for optimizer in optimizers:
            self.adopt(optimizer)
        return model

    def adopt(self, optimizer: Optimizer) -> None:
        """Put the shards into an optimizer's groups, and what it keeps of each parameter with them."""
        for group in optimizer.param_groups:
            for number, old in enumerate(group["params"]):
                shard = self._became.get(old)
                if shard is None:
                    continue
                group["params"][number] = shard
                if old in optimizer.state:
                    kept = optimizer.state.pop(old)
                    optimizer.state[shard] = {name: _spread(value, old, shard) for name, value in kept.items()}
        refuse_muon(optimizer)

    def _shard(self, model: nn.Module) -> None:
        plugin = self._plugin
        shared = [name for name, parameter in model.named_parameters() if parameter in self._became]
        if shared:
            raise Unsupported(
                f"This {type(model).__name__} shares {shared[0]} with a model that is sharded already, and would keep "
                "a copy of its own. Prepare one module that holds both."
            )
        if self._compute_dtype is not None:  # weights that were loaded in a half precision take updates in fp32
            for parameter in model.parameters():
                if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
                    parameter.data = parameter.data.float()
        before = dict(model.named_parameters(remove_duplicate=False))
        spares_memory = _is_on_meta(model, self.mesh)
        if spares_memory and self.mesh.cuts_layers:
            raise Unsupported("A model that is cut by tensor parallelism must have its values on all ranks.")
        is_first = self.mesh.everyone.rank == 0
        whole: dict[str, Any] = model.state_dict() if spares_memory and is_first else {}
        if not spares_memory:
            tensors = [*model.parameters(), *model.buffers()]
            broadcast_values([one for one in tensors if not is_sharded(one)], self.mesh.everyone)
            broadcast_values([one for one in tensors if is_sharded(one)], self.mesh.readers)
        ignored = _ignored(model, plugin.ignored_modules)
        wrapped = modules_to_wrap(model, plugin.policy_for(model), ignored)
        _recompute(model, wrapped, plugin)
        settings: dict[str, Any] = {"mesh": self.mesh.row, "mp_policy": self._policy(model)}
        settings["offload_policy"] = plugin.offload_policy if self._device.type != "cpu" else OffloadPolicy()
        for module in ignored:
            module.to_empty(device=self._device) if spares_memory and not is_first else module.to(self._device)
        if ignored:
            settings["ignored_params"] = {p for module in ignored for p in module.parameters()}
        for module in wrapped:
            fully_shard(module, reshard_after_forward=plugin.reshard_after_forward, **settings)
        # What the root holds itself is used at both ends of a pass, so that freeing it in between gains nothing.
        fully_shard(model, reshard_after_forward=False if wrapped else plugin.reshard_after_forward, **settings)
        if spares_memory:
            self._fill(model, before, whole)
        after = dict(model.named_parameters(remove_duplicate=False))
        for name, old in before.items():
            if after[name] is not old:
                self._became[old] = after[name]

    def _policy(self, model: nn.Module) -> MixedPrecisionPolicy:
        given: MixedPrecisionPolicy = self._plugin.mixed_precision_policy or MixedPrecisionPolicy()
        if given.reduce_dtype is not None:
            return given
        # Stated here, as None means another dtype of reductions in torch 2.15 than before.
        kinds = [p.dtype for p in model.parameters() if p.requires_grad]
        widest = max(kinds, key=lambda dtype: dtype.itemsize, default=torch.float32)
        return replace(given, reduce_dtype=given.param_dtype or widest)

    def _fill(self, model: nn.Module, before: dict[str, nn.Parameter], whole: dict[str, Any]) -> None:
        """Give every rank its shards of the values that rank 0 alone has loaded."""
        offloads = isinstance(self._plugin.offload_policy, CPUOffloadPolicy)
        device = torch.device("cpu") if offloads else self._device
        if self.mesh.everyone.rank != 0:
            model.to_empty(device=device)
            tied: dict[int, nn.Parameter] = {}
            for name, old in before.items():
                path, _, key = name.rpartition(".")
                owner = own_parameters(model.get_submodule(path))
                owner[key] = tied.setdefault(id(old), owner[key])
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, whole, options=options)
        broadcast_values(list(model.buffers()), self.mesh.everyone)


def _refuse_strange(became: Any, seen: weakref.WeakSet[Optimizer], optimizer: Optimizer, *_: object) -> None:
    """Raise StateError for an optimizer of weights that training has left behind; each optimizer is looked at once."""
    if optimizer not in seen:
        if any(parameter in became for group in optimizer.param_groups for parameter in group["params"]):
            raise StateError(
                f"This {type(optimizer).__name__} was made before its model was sharded, and would step weights that "
                "nobody uses any more. Pass it to prepare too."
            )
        seen.add(optimizer)


def _recompute(model: nn.Module, wrapped: Sequence[nn.Module], plugin: FullyShardedDataParallelPlugin) -> None:
    """Make modules keep only their inputs between forward and backward, if the plugin asks for it.

    Names of parameters stay as they are.
    """
    offload = bool(plugin.activation_checkpointing_offload)
    for module in (wrapped or [model]) if plugin.activation_checkpointing else ():
        if not _is_recomputed(module):
            wrap_forward(module, functools.partial(_recomputed, offload))


def _is_recomputed(module: nn.Module) -> bool:
    return hasattr(module.forward, _MARK)


def _recomputed(offload: bool, plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return plain(*args, **kwargs)
        kept = torch.autograd.graph.save_on_cpu(torch.accelerator.is_available()) if offload else nullcontext()
        with kept:
            return checkpoint(plain, *args, use_reentrant=False, **kwargs)

    setattr(forward, _MARK, True)
    return forward


def _is_on_meta(model: nn.Module, mesh: Mesh) -> bool:
    """Whether a rank lacks values of a model, and has shapes alone: the same on all ranks. Rank 0 must have them."""
    mine = any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    flags = mesh.everyone.all_gather_small(torch.tensor([float(mine)])).flatten().tolist()
    if not any(flags):
        return False
    if flags[0]:
        empty = [rank for rank, flag in enumerate(flags) if flag]
        raise ConfigError(
            f"The model lacks values (meta device) on the ranks {empty} of {mesh.everyone.size}. Load it on rank 0 at "
            "least, which gives them to the others (cpu_ram_efficient_loading)."
        )
    return True


def _ignored(model: nn.Module, asked: Any) -> list[nn.Module]:
    """Return the modules that stay whole: given themselves, or by a pattern that their names match."""
    parameters = list(asked or ())
    if isinstance(asked, str):
        parameters = [module for name, module in model.named_modules() if name and re.fullmatch(asked, name)]
        if not parameters:
            raise ConfigError(f"ignored_modules={asked!r} matches no module's name in this {type(model).__name__}.")
    if any(parameter.requires_grad for module in parameters for parameter in module.parameters()):
        raise Unsupported(
            "ignored_modules has a module that is trained, and nothing would average its gradients. Shard it too, or "
            "freeze it."
        )
    return parameters


def _spread(value: Any, old: Tensor, shard: Tensor) -> Any:
    """Return what an optimizer keeps of a parameter, as it keeps it of a shard."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    if value.shape != old.shape:
        raise StateError(
            f"The optimizer keeps a tensor of shape {list(value.shape)} of a parameter of shape {list(old.shape)}, "
            "which can't be sharded. Prepare the optimizer before its first step."
        )
    return spread_like(value, shard)


def modules_to_wrap(
    model: nn.Module, policy: Callable[..., bool] | None, ignored: Sequence[nn.Module] = ()
) -> list[nn.Module]:
    """Return the modules inside `model` to shard by themselves, inner ones before those that they are in.

    Two modules that share a parameter, such as an embedding and the output layer that is tied to it, are left to what
    is around both: torch takes each parameter once. `ignored` modules stay whole.
    """
    left_out = {id(inner) for module in ignored for inner in module.modules()}
    chosen: list[nn.Module] = []

    def visit(module: nn.Module) -> int:
        """Return how many parameters of `module` are wrapped, once it has been asked for."""
        assert policy is not None
        if id(module) in left_out:
            return 0
        numel = sum(parameter.numel() for parameter in module.parameters())
        if not policy(module=module, recurse=True, nonwrapped_numel=numel):
            return 0
        wrapped = sum(map(visit, module.children()))
        if module is model or not policy(module=module, recurse=False, nonwrapped_numel=numel - wrapped):
            return wrapped
        chosen.append(module)
        return numel

    if policy is not None:
        visit(model)
    return _without_ties(model, list(dict.fromkeys(chosen)))


def _without_ties(model: nn.Module, chosen: Sequence[nn.Module]) -> list[nn.Module]:
    """Leave out the modules that share a parameter with something outside of them."""

    def uses(root: nn.Module) -> Counter[int]:
        return Counter(id(parameter) for module in root.modules() for parameter in module.parameters(recurse=False))

    everywhere = uses(model)
    return [module for module in chosen if all(everywhere[key] == count for key, count in uses(module).items())]
