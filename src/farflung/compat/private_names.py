# SPDX-License-Identifier: Apache-2.0
"""Private names of Accelerate's that its public tests or widely used libraries import. Nothing here uses them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch.nn as nn

from farflung.base.errors import ConfigError
from farflung.compat.cluster import ClusterConfig
from farflung.compat.launch_functions import flags_of
from farflung.config.resolve import resolve


def _filter_args(
    args: argparse.Namespace, parser: argparse.ArgumentParser, default_args: Sequence[str] = ()
) -> argparse.Namespace:
    """Return `default_args` as `parser` reads them, with the values of `args` for what both have."""
    filtered, _ = parser.parse_known_args(list(default_args))
    for name in vars(filtered).keys() & vars(args).keys():
        setattr(filtered, name, getattr(args, name))
    return filtered


def _validate_launch_command(args: argparse.Namespace) -> tuple[argparse.Namespace, ClusterConfig | None, bool]:
    """Give each launch setting of `args` the value that counts: of its flag, its variable, the file, or its default.

    Returns `args`, the configuration file as an object (None: there is none), and whether the precision is the file's.
    """
    resolved = resolve(flags_of(args))
    vars(args).update(vars(resolved.settings))
    file = None if resolved.file is None else ClusterConfig.from_yaml_file(resolved.file)
    return args, file, resolved.origins["mixed_precision"].kind == "file"


def _refuse_recurrent_layers_under_sequence_parallelism(model: nn.Module) -> None:
    """Raise ConfigError for a model of linear attention: each rank would begin with an empty state."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    recurrent = {kind for kind in getattr(text, "layer_types", None) or () if "linear_attention" in kind}
    if recurrent:
        raise ConfigError(
            f"{type(model).__name__} has layers of {', '.join(sorted(recurrent))}: their state runs along the "
            "sequence, so they can't be trained on parts of it. Leave sequence parallelism out."
        )
