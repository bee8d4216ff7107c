# SPDX-License-Identifier: Apache-2.0
"""Door: the command `farflung config`."""

from farflung.base.absent import config_command, config_command_parser, get_user_input

__all__ = ["config_command", "config_command_parser", "get_user_input"]
