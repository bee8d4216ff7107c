# SPDX-License-Identifier: Apache-2.0
"""How ranks share models, under Accelerate's names, and engines and axes that Farflung does not have.

Scripts ask for a plugin and go on where it is None, so None it is. What could only be used is refused instead.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from farflung.accelerator.session import Layout
from farflung.base.errors import StateError, Unsupported
from farflung.base.forward import Forward
from farflung.process.world import World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from farflung.config.parallelism import ParallelismConfig
    from farflung.config.sharding import FullyShardedDataParallelPlugin


def _nothing(instance: object) -> None:
    """Answer None, for a plugin or handler that there is not."""


class Engines:
    """What shards models, as `Accelerator` and `AcceleratorState` both answer: FSDP2, or nothing."""

    if TYPE_CHECKING:

        @property
        def _layout(self) -> Layout | None: ...
        @property
        def _world(self) -> World: ...

    @property
    def fsdp_plugin(self) -> FullyShardedDataParallelPlugin | None:
        """How models are sharded; None: they are not."""
        return None if self._layout is None else self._layout.fsdp

    @property
    def parallelism_config(self) -> ParallelismConfig | None:
        """The grid of ranks that the script or the launcher asked for; None: neither did."""
        return None if self._layout is None else self._layout.parallelism

    @property
    def is_fsdp2(self) -> bool:
        """Whether models are sharded over several processes."""
        return self.fsdp_plugin is not None and self._world.size > 1

    deepspeed_plugin = Forward[None](_nothing, "None: DeepSpeed is not supported.")
    megatron_lm_plugin = Forward[None](_nothing, "None: Megatron-LM is not supported.")
    torch_tp_plugin = Forward[None](_nothing, "None: tensor parallelism is not supported.")

    @property
    def _device_mesh(self) -> DeviceMesh | None:
        return None if self.parallelism_config is None else self.parallelism_config.device_mesh


class Axes(Engines):
    """Where an `Accelerator` stands on each axis of the grid, and what it says of axes and optimizers of others."""

    torch_device_mesh = Forward["DeviceMesh | None"](
        "_device_mesh", "The mesh of a `ParallelismConfig`, of its axes with several ranks; None without one."
    )
    is_composable_parallelism_enabled = Forward[bool]("is_fsdp2", "Whether models are sharded over several processes.")

    @property
    def data_parallel_rank(self) -> int:
        """The row of this process, its place among the replicas of a `ParallelismConfig`; StateError without one."""
        return self._grid("data_parallel_rank").mesh.replicas.rank

    @property
    def data_parallel_shard_rank(self) -> int:
        """The column of this process, its place among the shards of a `ParallelismConfig`; StateError without one."""
        return self._grid("data_parallel_shard_rank").mesh.island.rank

    @property
    def tensor_parallel_rank(self) -> int:
        """0: the axis of tensor parallelism has one place; StateError without a `ParallelismConfig`."""
        self._grid("tensor_parallel_rank")
        return 0

    def _grid(self, name: str) -> Layout:
        if self._layout is None or self._layout.parallelism is None:
            raise StateError(
                f"{name}: this run has no parallelism configuration, so there is no such axis. Use process_index."
            )
        return self._layout

    @property
    def context_parallel_rank(self) -> int:
        """This process's place along the axis of context parallelism, which there is not: Unsupported."""
        raise Unsupported("context_parallel_rank: context parallelism is not supported. Use process_index.")

    @property
    def pipeline_parallel_rank(self) -> int:
        """This process's place along the axis of pipeline parallelism, which there is not: Unsupported."""
        raise Unsupported("pipeline_parallel_rank: pipeline parallelism is not supported. Use process_index.")

    should_save_model = Forward[bool](
        lambda self: True, "True: saving is called by all processes, and chooses by itself which of them write."
    )
    delayed_fp8_autocast = Forward[bool](lambda self: False, "False: that is of TransformerEngine.")
    has_lomo_optimizer = Forward[bool](lambda self: False, "False: LOMO's optimizers are not supported.")
    te_recipe_handler = Forward[None](_nothing, "None: TransformerEngine is not supported.")
    msamp_recipe_handler = Forward[None](_nothing, "None: MS-AMP is not supported.")

    def lomo_backward(self, loss: Tensor, learning_rate: float) -> None:
        """Raise Unsupported: LOMO steps inside its backward pass."""
        raise Unsupported(
            "lomo_backward: LOMO's optimizers are not supported. Use backward(loss) and optimizer.step()."
        )

    def deepspeed_ulysses_dl_adapter(self, dl: Any, model: Any) -> Any:
        """Return the loader `dl` as it is: sequences are not shared out among processes."""
        return dl

    def maybe_context_parallel(
        self,
        buffers: list[Tensor] | None = None,
        buffer_seq_dims: list[int] | None = None,
        no_restore_buffers: set[Tensor] | None = None,
    ) -> AbstractContextManager[None]:
        """Return a context that changes nothing, as there is no context parallelism."""
        return nullcontext()

    def verify_device_map(self, model: nn.Module) -> bool:
        """Whether a device map spreads `model`, or a module in it, over several devices."""
        maps = (getattr(module, "hf_device_map", None) for module in model.modules())
        return any(isinstance(found, dict) and len(found) > 1 for found in maps)
