# SPDX-License-Identifier: Apache-2.0
"""Door: rewriting a configuration file, which Farflung does not do."""

from farflung.compat.absent import (
    update_command_parser as update_command_parser,
    update_config as update_config,
    update_config_command as update_config_command,
)
