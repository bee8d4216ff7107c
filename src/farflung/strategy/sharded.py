# SPDX-License-Identifier: Apache-2.0
"""Models whose parameters are shards, by torch's `fully_shard`: what every strategy does with them.

Within a row of the mesh torch gathers parameters and reduces gradients. Along a column the rows that have the same
shards average what is left of that, unless an outer loop does it now and then instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from farflung.base.errors import ConfigError, Unsupported
from farflung.base.torch_internals import taken
from farflung.comm.group import Group
from farflung.comm.shards import is_sharded, meshes, model_has_dtensor, reshard, sharded_parts
from farflung.comm.torch_group import TorchGroup
from farflung.process.mesh import Mesh
from farflung.strategy.base import Strategy


class ShardedModels(Strategy):
    """Holds back, or allows, what sharded models send: within the rows of a mesh, and along its columns."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        self._silent: list[nn.Module] = []  # inside `no_sync`
        self._local: list[nn.Module] = []  # inside `local`

    def take(self, model: nn.Module) -> None:
        """Take in a model whose parameters are shards, over a row of the mesh or over all ranks."""
        parts = sharded_parts(model.modules())
        if not parts and self.mesh.cuts_layers:
            return  # ranks of tensor parallelism alone, which need no more than torch sums for them
        if not parts:
            raise Unsupported(
                f"The parameters of this {type(model).__name__} are DTensors, but it was not sharded by fully_shard, "
                "so nothing would average its gradients. Shard it with torch.distributed.fsdp.fully_shard."
            )
        plain = [name for name, p in model.named_parameters() if p.requires_grad and not is_sharded(p)]
        if plain:
            raise Unsupported(
                f"Nothing would average the gradients of {', '.join(plain[:3])}: other parameters of this "
                f"{type(model).__name__} are shards, and these are not. Call fully_shard on the whole model too."
            )
        model.register_forward_hook(_reshard_after_evaluation)
        if self._spans_all(model) or self.mesh.replicas.size == 1:
            return
        use = "average the gradients of shards between rows"
        for part in parts:
            taken(part, "set_all_reduce_hook", use)(partial(self._average_columns, model))

    def check_parallel(self, model: nn.Module) -> None:
        """Raise ConfigError for a model that is whole, where ranks of tensor parallelism see the same data."""
        if self.mesh.cuts_layers and not model_has_dtensor(model):
            raise ConfigError(
                f"This run has a ParallelismConfig with tp_size, but no parameter of this {type(model).__name__} is a "
                "DTensor: prepare wraps a model, and the script cuts it before. Call parallelize_module(model, "
                'accelerator.torch_device_mesh["tp"], plan), or leave out tp_size.'
            )

    def _spans_all(self, model: nn.Module) -> bool:
        """Whether torch itself averages the gradients of `model` over all ranks; False: over this rank's row."""
        everyone, island = self.mesh.everyone, self.mesh.island
        found = [mesh.mesh.flatten().tolist() for mesh in meshes(model.parameters())]
        if len(set().union(*found)) in (0, everyone.size):
            return True
        if isinstance(island, TorchGroup) and set().union(*found) == set(island.ranks):
            return False
        raise ConfigError(
            f"This model is sharded over the ranks {found}, but the rows of this run's mesh have "
            f"{self.mesh.island.size} of {everyone.size}. Shard neighbouring ranks, and give their number as "
            "Accelerator(parallelism_config=ParallelismConfig(dp_replicate_size=, dp_shard_size=))."
        )

    def _average_columns(self, model: nn.Module, gradient: Tensor) -> None:
        if any(model is other for other in self._local):
            return
        if gradient.device.type != "cpu":  # torch reduced it on another stream, and may give it back too early
            gradient.record_stream(torch.accelerator.current_stream())
        columns = self.mesh.replicas
        columns.all_reduce(gradient.div_(columns.size)).wait()

    @contextmanager
    def _synchronized(self, model: nn.Module, synchronized: bool) -> Iterator[None]:
        before, parts = self._silent, sharded_parts(model.modules())
        others = [other for other in before if other is not model]
        self._silent = others if synchronized else [*others, model]
        for part in parts:
            part.set_requires_gradient_sync(synchronized, recurse=False)
        try:
            yield
        finally:
            self._silent = before
            for part in parts:
                part.set_requires_gradient_sync(all(model is not other for other in before), recurse=False)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        return self._synchronized(model, False)

    def sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        return self._synchronized(model, True)

    @contextmanager
    def _alone(self, model: nn.Module) -> Iterator[None]:
        if self.mesh.replicas.size > 1 and self._spans_all(model):
            raise ConfigError(
                f"This model is sharded over all {self.mesh.everyone.size} ranks, so there are no replicas that an "
                "outer loop could average. Shard it over rows: ParallelismConfig(dp_replicate_size=, dp_shard_size=)."
            )
        self._local.append(model)
        try:
            yield
        finally:
            self._local.remove(model)

    def local(self, model: nn.Module) -> AbstractContextManager[Any]:
        return self._alone(model) if sharded_parts(model.modules()) else nullcontext()

    def averaged_over(self, model: nn.Module) -> Group | None:
        if not sharded_parts(model.modules()):
            return None
        return self.mesh.island if any(model is other for other in self._local) else self.mesh.everyone

    def awaited(self, model: nn.Module) -> Group | None:
        if not sharded_parts(model.modules()):
            return None
        is_averaged = torch.is_grad_enabled() and all(model is not other for other in self._silent)
        if is_averaged or self.mesh.device_mesh is None:
            return self.averaged_over(model)
        return self.mesh.everyone if self._spans_all(model) else self.mesh.island


def _reshard_after_evaluation(model: nn.Module, inputs: Any, outputs: Any) -> None:
    """Make the parameters of `model` shards again, as they are after a backward pass, if none will come."""
    if not torch.is_grad_enabled():
        reshard(model.modules())


def refuse_muon(optimizer: Any) -> None:
    """Raise Unsupported for torch's Muon over shards, which it would take for whole matrices."""
    if isinstance(optimizer, torch.optim.Muon) and any(
        is_sharded(parameter) for group in optimizer.param_groups for parameter in group["params"]
    ):
        raise Unsupported(
            "torch.optim.Muon orthogonalizes whole matrices and does not know shards. Train with AdamW, or with DDP."
        )
