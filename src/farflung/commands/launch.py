# SPDX-License-Identifier: Apache-2.0
"""Door: the launcher as functions."""

from farflung.compat.absent import (
    CustomHelpFormatter,
    clean_option,
    deepspeed_launcher,
    sagemaker_launcher,
    tpu_launcher,
    tpu_pod_launcher,
)
from farflung.compat.launch_functions import (
    launch_command,
    launch_command as multi_gpu_launcher,
    launch_command as simple_launcher,
    launch_command_parser,
    main,
)
from farflung.compat.private_names import _validate_launch_command

__all__ = [
    "CustomHelpFormatter",
    "_validate_launch_command",
    "clean_option",
    "deepspeed_launcher",
    "launch_command",
    "launch_command_parser",
    "main",
    "multi_gpu_launcher",
    "sagemaker_launcher",
    "simple_launcher",
    "tpu_launcher",
    "tpu_pod_launcher",
]

if __name__ == "__main__":
    main()
