# SPDX-License-Identifier: Apache-2.0
"""Door: merging shards of FSDP, which is not there yet."""

from farflung.base.absent import merge_command, merge_command_parser

__all__ = ["merge_command", "merge_command_parser"]
