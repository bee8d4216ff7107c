# SPDX-License-Identifier: Apache-2.0
"""Door: the command that merges shards, which is not there: use `farflung.utils.merge_fsdp_weights`."""

from farflung.base.absent import merge_command, merge_command_parser

__all__ = ["merge_command", "merge_command_parser"]
