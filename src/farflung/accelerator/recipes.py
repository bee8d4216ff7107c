# SPDX-License-Identifier: Apache-2.0
"""From an `OuterConfig`, which holds names and plain values, to the recipe that it means."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from farflung.config.outer import MACHINE, OuterConfig
from farflung.outer.codec.base import Cast, Codec, Identity
from farflung.outer.codec.blockwise import E3M0, Fp8, Int4, Int8
from farflung.outer.codec.sparse import TopK
from farflung.outer.inner import Average, Inner, Keep, Reset
from farflung.outer.recipe import Recipe
from farflung.outer.recipes import (
    diloco,
    eager_diloco,
    edit,
    gossip,
    hierarchical,
    local_sgd,
    noloco,
    post_local_sgd,
    quadratic,
    slowmo,
    sparse_loco,
    streaming_diloco,
)

MAKERS: Mapping[str, Callable[..., Recipe]] = {
    "local_sgd": local_sgd,
    "post_local_sgd": post_local_sgd,
    "hierarchical": hierarchical,
    "quadratic": quadratic,
    "slowmo": slowmo,
    "diloco": diloco,
    "streaming_diloco": streaming_diloco,
    "eager_diloco": eager_diloco,
    "sparse_loco": sparse_loco,
    "edit": edit,
    "gossip": gossip,
    "noloco": noloco,
}
_CODECS: Mapping[str, Callable[[], Codec]] = {
    "none": Identity,
    "bf16": lambda: Cast("bf16"),
    "fp16": lambda: Cast("fp16"),
    "int8": Int8,
    "int4": Int4,
    "fp8": Fp8,
    "e3m0": E3M0,
    "topk": TopK,
}
_INNER: Mapping[str, Callable[[], Inner]] = {"keep": Keep, "reset": Reset, "average": Average}


def recipe_of(config: OuterConfig, local_size: int) -> Recipe:
    """Return the recipe that `config` names, with its options.

    Args:
        local_size: ranks on this machine.

    Raises:
        ConfigError: parts that do not go together.
    """
    options = config.given()
    options.pop("log", None)
    if "codec" in options:
        options["codec"] = _CODECS[options["codec"]]()
    if "levels" in options:
        options["levels"] = _resolved(options["levels"], local_size)
    names = ("weigh_by", "anchor_on_cpu", "inner", "bucket_bytes")
    parts = {name: options.pop(name) for name in names if name in options}
    if "inner" in parts:
        parts["inner"] = _INNER[parts["inner"]]()
    recipe = MAKERS[config.recipe](**options)
    return replace(recipe, **parts) if parts else recipe


def _resolved(levels: Mapping[int, Any], local_size: int) -> dict[int, int | None]:
    """Put numbers for `machine`; where a machine has one rank alone there is nobody to average with, and no level."""
    sizes = {every: local_size if size == MACHINE else size for every, size in levels.items()}
    return {every: size for every, size in sizes.items() if size is None or size > 1}
