# SPDX-License-Identifier: Apache-2.0
"""Door: rewriting files for FSDP 2, which is not there: `farflung launch` reads those of version 1 as they are."""

from farflung.compat.absent import (
    ConversionStatus as ConversionStatus,
    convert_config_to_fsdp2 as convert_config_to_fsdp2,
    load_config as load_config,
    to_fsdp2_command as to_fsdp2_command,
    to_fsdp2_command_parser as to_fsdp2_command_parser,
)
