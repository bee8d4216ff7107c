# SPDX-License-Identifier: Apache-2.0
"""fp8 through torchao: the matrix products of linear layers in 8 bits, all else in bf16, weights as they are."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch
from torch import nn

from farflung.base.errors import ConfigError, Unsupported
from farflung.base.optional import installed_version
from farflung.config.handlers import AORecipeKwargs, AutocastKwargs
from farflung.precision.amp import Autocast

_INSTEAD = "Use mixed_precision='bf16'."


class Float8(Autocast):
    """bf16 forward passes in which linear layers multiply in fp8.

    Args:
        device: where it computes: an NVIDIA GPU with compute capability 8.9 (Ada, Hopper) or more.
        recipe: what is converted, and how. A config with `emulate=True` computes with rounded numbers on any device.

    Raises:
        Unsupported: torchao is not installed, or the device has no fp8.
    """

    def __init__(
        self, device: torch.device, handler: AutocastKwargs | None = None, recipe: AORecipeKwargs | None = None
    ) -> None:
        super().__init__("bf16", device.type, handler)
        self.name = "fp8"
        self.recipe = recipe or AORecipeKwargs()
        if not installed_version("torchao"):
            raise Unsupported(f"mixed_precision='fp8' needs torchao: `pip install torchao`. Or: {_INSTEAD}")
        if not getattr(self.recipe.config, "emulate", False):
            if device.type != "cuda":
                raise Unsupported(f"mixed_precision='fp8' computes on NVIDIA GPUs, not on {device.type}. {_INSTEAD}")
            if torch.cuda.get_device_capability(device) < (8, 9):
                raise Unsupported(f"{torch.cuda.get_device_name(device)} does not compute in fp8. {_INSTEAD}")

    def wrap(self, model: nn.Module) -> nn.Module:
        if not has_ao_layers(model):
            from torchao.float8 import Float8LinearConfig

            self.recipe.check()
            config = self.recipe.config or Float8LinearConfig(pad_inner_dim=self.recipe.pad_inner_dim is not False)
            convert_model_to_fp8_ao(model, config, self.recipe.module_filter_func)
            if not has_ao_layers(model):
                warnings.warn(
                    f"mixed_precision='fp8': no layer of this {type(model).__name__} was converted, so it computes in "
                    "bf16. Linear layers are, whose sizes are multiples of 16, but the first and the last.",
                    stacklevel=2,
                )
        return super().wrap(model)


def convert_model_to_fp8_ao(model: nn.Module, config: Any = None, module_filter_func: Any = None) -> None:
    """Make linear layers of `model`, which is none itself, multiply in fp8, in place; parameters stay the same objects.

    Args:
        config: a `torchao.float8.Float8LinearConfig`, None: torchao's defaults.
        module_filter_func: takes a module and its name, and says whether it is converted. None: linear layers whose
            sizes are multiples of 16, but the first and the last.
    """
    from torchao.float8 import convert_to_float8_training

    if module_filter_func is None:
        module_filter_func = partial(filter_linear_layers, layers_to_filter=find_first_last_linear_layers(model))
    converted = convert_to_float8_training(model, module_filter_fn=module_filter_func, config=config)
    if converted is not model:
        raise ConfigError(
            "fp8: the model is itself a linear layer, which can't be converted in place. Put it in a module."
        )


def find_first_last_linear_layers(model: nn.Module) -> tuple[str | None, str | None]:
    """Return the names of the first and the last linear layer, which lose most by 8 bits; None if there is none."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return (names[0], names[-1]) if names else (None, None)


def filter_linear_layers(module: nn.Module, fqn: str, layers_to_filter: Any) -> bool:
    """Return whether fp8 hardware takes `module`, and its name is not in `layers_to_filter`.

    Only linear layers are looked at: torchao leaves all others alone, whatever the answer.
    """
    does_fit = not isinstance(module, nn.Linear) or module.in_features % 16 == module.out_features % 16 == 0
    return does_fit and fqn not in layers_to_filter


def filter_first_and_last_linear_layers(module: nn.Module, fqn: str) -> bool:
    """Return whether `fqn` names neither the first nor the last linear layer inside `module`, which itself fits."""
    return filter_linear_layers(module, fqn, find_first_last_linear_layers(module))


def has_ao_layers(model: nn.Module) -> bool:
    """Return whether a layer of `model` multiplies in fp8."""
    from torchao.float8.float8_linear import Float8Linear

    return any(isinstance(module, Float8Linear) for module in model.modules())
