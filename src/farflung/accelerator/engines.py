# SPDX-License-Identifier: Apache-2.0
"""Accelerate's words for engines and axes that Farflung does not have: each says that it is not there.

Scripts ask for a plugin and go on where it is None, so None it is. What could only be used is refused instead.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from farflung.base.errors import StateError, Unsupported


class UnsupportedEngines:
    """The plugins of other engines, which `Accelerator` and `AcceleratorState` both have: there are none."""

    @property
    def deepspeed_plugin(self) -> None:
        """None: DeepSpeed is not supported."""
        return None

    @property
    def fsdp_plugin(self) -> None:
        """None: FSDP is not supported yet."""
        return None

    @property
    def megatron_lm_plugin(self) -> None:
        """None: Megatron-LM is not supported."""
        return None

    @property
    def torch_tp_plugin(self) -> None:
        """None: tensor parallelism is not supported."""
        return None

    @property
    def parallelism_config(self) -> None:
        """None: processes are arranged along one axis, that of the data."""
        return None

    @property
    def is_fsdp2(self) -> bool:
        """False: no model is sharded."""
        return False


class UnsupportedAxes(UnsupportedEngines):
    """What an `Accelerator` says of axes other than that of the data, and of engines and optimizers of others."""

    @property
    def torch_device_mesh(self) -> None:
        """None: processes are arranged along one axis."""
        return None

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """False: there is one axis."""
        return False

    @property
    def tensor_parallel_rank(self) -> int:
        """This process's place along the axis of tensor parallelism, which there is not: StateError."""
        raise _no_axis("tensor_parallel_rank")

    @property
    def context_parallel_rank(self) -> int:
        """This process's place along the axis of context parallelism, which there is not: Unsupported."""
        raise Unsupported("context_parallel_rank: context parallelism is not supported. Use process_index.")

    @property
    def pipeline_parallel_rank(self) -> int:
        """This process's place along the axis of pipeline parallelism, which there is not: Unsupported."""
        raise Unsupported("pipeline_parallel_rank: pipeline parallelism is not supported. Use process_index.")

    @property
    def data_parallel_rank(self) -> int:
        """This process's place among replicas of a parallelism configuration, which there is not: StateError."""
        raise _no_axis("data_parallel_rank")

    @property
    def data_parallel_shard_rank(self) -> int:
        """This process's place among the shards of a parallelism configuration, which there is not: StateError."""
        raise _no_axis("data_parallel_shard_rank")

    @property
    def should_save_model(self) -> bool:
        """True: each process has the whole model, and saving chooses by itself which of them writes."""
        return True

    @property
    def te_recipe_handler(self) -> None:
        """None: TransformerEngine is not supported."""
        return None

    @property
    def msamp_recipe_handler(self) -> None:
        """None: MS-AMP is not supported."""
        return None

    @property
    def delayed_fp8_autocast(self) -> bool:
        """False: that is of TransformerEngine."""
        return False

    @property
    def has_lomo_optimizer(self) -> bool:
        """False: LOMO's optimizers are not supported."""
        return False

    def lomo_backward(self, loss: Tensor, learning_rate: float) -> None:
        """Refused: LOMO steps inside its backward pass.

        Raises:
            Unsupported: always.
        """
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


def _no_axis(name: str) -> StateError:
    return StateError(
        f"{name}: this run has no parallelism configuration, so there is no such axis. Use process_index."
    )
