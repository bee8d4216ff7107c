# SPDX-License-Identifier: Apache-2.0
"""A model's size in the cost model's plain numbers. This file needs torch, as models do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn
from torch.distributed.fsdp import FSDPModule

from farflung.base.errors import ConfigError
from farflung.cost.memory import ModelSize


def size_of(model: nn.Module, classes: Iterable[str] | None = None, *, state_values: int = 2) -> ModelSize:
    """Return how large a model is, and in which groups FSDP gathers it. What is trained must be of one dtype.

    The model may be on the meta device, or sharded already: then the groups are those that it was sharded in.

    Args:
        classes: names of the classes whose modules are groups of their own, as `transformer_cls_names_to_wrap` has
            them; None: those that the model's modules name themselves (`_no_split_modules`), if they do.
        state_values: that the optimizer keeps for each trained parameter: 2 for Adam, 1 for momentum.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    dtypes = sorted({str(parameter.dtype) for parameter in trained})
    if len(dtypes) != 1:
        raise ConfigError(
            f"size_of: the trained parameters of this {type(model).__name__} have {len(dtypes)} dtypes {dtypes}; an "
            "estimate needs one. Convert the model first, or have some parameter require gradients."
        )
    seen: set[int] = set()
    groups = [_numel_of_new(module, seen) for module in _groups(model, classes)]
    return ModelSize(
        groups=(_numel_of_new(model, seen), *reversed(groups)),
        trained=sum(parameter.numel() for parameter in trained),
        value_bytes=trained[0].element_size(),
        state_values=state_values,
    )


def _groups(model: nn.Module, classes: Iterable[str] | None) -> Iterator[nn.Module]:
    """Yield the modules that are groups of their own, those inside of others first."""
    inside = [module for module in model.modules() if module is not model][::-1]
    if isinstance(model, FSDPModule):
        yield from (module for module in inside if isinstance(module, FSDPModule))
        return
    named = (getattr(module, "_no_split_modules", None) or () for module in model.modules())
    names = {name for one in named for name in one} if classes is None else set(classes)
    yield from (module for module in inside if type(module).__name__ in names)


def _numel_of_new(module: nn.Module, seen: set[int]) -> int:
    """Count the values of the parameters of `module` that no group has yet."""
    new = {id(parameter): parameter for parameter in module.parameters() if id(parameter) not in seen}
    seen.update(new)
    return sum(parameter.numel() for parameter in new.values())
