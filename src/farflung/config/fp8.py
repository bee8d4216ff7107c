# SPDX-License-Identifier: Apache-2.0
"""What may be said of fp8; apart from the other handlers, since few scripts load it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from farflung.base.checks import check_callable, check_fields
from farflung.base.errors import ConfigError, Unsupported
from farflung.config.handlers import KwargsHandler


@dataclass(frozen=True)
class AORecipeKwargs(KwargsHandler):
    """How torchao trains in fp8, for `mixed_precision="fp8"`.

    Args:
        config: a `torchao.float8.Float8LinearConfig`; None makes one of the two fields below.
        module_filter_func: takes a module and its name, and says whether it is converted. None: linear layers whose
            sizes are multiples of 16, but the first and the last of the model.
        pad_inner_dim: pad matrices to multiples of 16, as the hardware wants them; None: yes.
        enable_fsdp_float8_all_gather: refused, as weights are gathered in bf16; None: no.
    """

    config: Any = None
    module_filter_func: Callable[..., bool] | None = None
    pad_inner_dim: bool | None = None
    enable_fsdp_float8_all_gather: bool | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.module_filter_func is not None:
            check_callable(
                "AORecipeKwargs: module_filter_func", self.module_filter_func, "one of a module and its name"
            )
        if self.config is not None and self.pad_inner_dim is not None:
            raise ConfigError("AORecipeKwargs: config and pad_inner_dim were both given. Give it in the config.")
        if self.enable_fsdp_float8_all_gather:
            raise Unsupported(
                "enable_fsdp_float8_all_gather=True is not supported: FSDP gathers weights in bf16. Leave it out."
            )
