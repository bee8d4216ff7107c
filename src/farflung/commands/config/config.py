# SPDX-License-Identifier: Apache-2.0
"""Door: the command `farflung config`."""

from farflung.compat.absent import (
    config_command as config_command,
    config_command_parser as config_command_parser,
    get_user_input as get_user_input,
)
