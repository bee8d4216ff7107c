# SPDX-License-Identifier: Apache-2.0
"""Door: the launcher as functions."""

from farflung.compat.absent import __getattr__ as __getattr__
from farflung.compat.launch_functions import (
    launch_command as launch_command,
    launch_command_parser as launch_command_parser,
    main as main,
    multi_gpu_launcher as multi_gpu_launcher,
    simple_launcher as simple_launcher,
)
from farflung.compat.private_names import _validate_launch_command as _validate_launch_command

if __name__ == "__main__":
    main()
