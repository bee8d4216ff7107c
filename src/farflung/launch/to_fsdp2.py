# SPDX-License-Identifier: Apache-2.0
"""`farflung to-fsdp2`: rewrites an Accelerate file for FSDP version 1 with the keys of version 2."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Any

import yaml

from farflung.base.errors import ConfigError
from farflung.base.files import atomic_file
from farflung.config.files import read_mapping
from farflung.config.sharding import parse_reshard
from farflung.launch.commands import command_parser, parsed_command

__all__ = ["convert_config_to_fsdp2", "load_config", "to_fsdp2_command", "to_fsdp2_command_parser"]

# Version 1's keys that have no counterpart: FSDP2 always does what they ask for, or can't.
_GONE = ("fsdp_backward_prefetch", "fsdp_forward_prefetch", "fsdp_sync_module_states", "fsdp_use_orig_params")

_log = logging.getLogger("farflung.commands.to_fsdp2")


def to_fsdp2_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of `farflung to-fsdp2`; with `subparsers` it is their command of that name."""
    about = "Rewrite an Accelerate file for FSDP version 1 with the keys of version 2."
    parser = command_parser("to-fsdp2", about, to_fsdp2_command, subparsers)
    parser.add_argument("--config_file", "--config-file", required=True, help="The file to convert.")
    parser.add_argument("--output_file", "--output-file", help="The file to write. [with --overwrite, the same file]")
    parser.add_argument("--overwrite", action="store_true", help="Replace the output file if it exists.")
    return parser


def to_fsdp2_command(args: argparse.Namespace) -> None:
    """Convert a file; `args` are from `to_fsdp2_command_parser`.

    Raises:
        FileNotFoundError: there is no such file.
        FileExistsError: the output file is there, and `overwrite` is not set.
        ConfigError: neither `output_file` nor `overwrite` is set.
        Unsupported: version 2 can't do what the file asks for.
    """
    if not Path(args.config_file).exists():
        raise FileNotFoundError(f"The configuration file {args.config_file} does not exist.")
    if args.output_file is None and not args.overwrite:
        raise ConfigError("Neither --output_file nor --overwrite is given. Name the file to write, or allow this one.")
    output = args.output_file or args.config_file
    if Path(output).exists() and not args.overwrite:
        raise FileExistsError(f"The output file {output} exists. Give --overwrite to replace it.")
    text = yaml.safe_dump(convert_config_to_fsdp2(load_config(args.config_file)))
    with atomic_file(output) as part:
        part.write_text(text, encoding="utf-8")


def load_config(config_file: str) -> dict[str, Any]:
    """Return the entries of a configuration file; ConfigError if there are none."""
    root = read_mapping(Path(config_file))
    if root is None:
        raise ConfigError(f"{config_file} has no settings to convert.")
    try:
        config: dict[str, Any] = yaml.SafeLoader("").construct_document(root)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that is none
        raise ConfigError(f"{config_file} has values that can't be read: {str(error).splitlines()[0]}.") from None
    return config


def convert_config_to_fsdp2(config: dict[str, Any]) -> dict[str, Any]:
    """Return `config` with its block `fsdp_config` in the keys of version 2; a warning names each key that is left out.

    Without such a block, or if it is one of version 2, nothing changes. Raises Unsupported for a strategy that
    version 2 has no key for.
    """
    block = config.get("fsdp_config")
    if not block:
        return config
    if not isinstance(block, dict):
        raise ConfigError(f"fsdp_config is {block!r}; it must be a mapping of `key: value` lines.")
    if block.get("fsdp_version", 1) == 2:
        _log.warning("Config already specifies FSDP2, skipping conversion...")
        return config
    converted: dict[str, Any] = {}
    for key, value in block.items():
        if key in _GONE:
            _log.warning("%s has no counterpart in FSDP2 and is left out.", key)
        elif key in ("fsdp_sharding_strategy", "fsdp_reshard_after_forward"):
            converted["fsdp_reshard_after_forward"] = parse_reshard(1, value, key)
        else:
            converted[key] = value
    return {**config, "fsdp_config": converted | {"fsdp_version": 2}}


to_fsdp2 = parsed_command("to-fsdp2", to_fsdp2_command_parser, to_fsdp2_command)
