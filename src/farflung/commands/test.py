# SPDX-License-Identifier: Apache-2.0
"""Door: Accelerate's test of an installation."""

from farflung.compat.absent import test_command as test_command, test_command_parser as test_command_parser
from farflung.launch.main import main

if __name__ == "__main__":
    main(["test"])
