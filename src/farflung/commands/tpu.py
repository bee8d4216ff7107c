# SPDX-License-Identifier: Apache-2.0
"""Door: TPUs, which are not there."""

from farflung.compat.absent import (
    tpu_command_launcher as tpu_command_launcher,
    tpu_command_parser as tpu_command_parser,
)
