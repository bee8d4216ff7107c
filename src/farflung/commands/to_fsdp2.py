# SPDX-License-Identifier: Apache-2.0
"""Door: rewriting files for FSDP 2, which is not there: `farflung launch` reads those of version 1 as they are."""

from farflung.base.absent import (
    ConversionStatus,
    convert_config_to_fsdp2,
    load_config,
    to_fsdp2_command,
    to_fsdp2_command_parser,
)

__all__ = ["ConversionStatus", "convert_config_to_fsdp2", "load_config", "to_fsdp2_command", "to_fsdp2_command_parser"]
