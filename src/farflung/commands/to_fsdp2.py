# SPDX-License-Identifier: Apache-2.0
"""Door: rewriting configurations for FSDP, which is not there yet."""

from farflung.base.absent import (
    ConversionStatus,
    convert_config_to_fsdp2,
    load_config,
    to_fsdp2_command,
    to_fsdp2_command_parser,
)

__all__ = ["ConversionStatus", "convert_config_to_fsdp2", "load_config", "to_fsdp2_command", "to_fsdp2_command_parser"]
