# SPDX-License-Identifier: Apache-2.0
"""Door: the command `farflung env`."""

from farflung.base.absent import env_command, env_command_parser

__all__ = ["env_command", "env_command_parser"]
