# SPDX-License-Identifier: Apache-2.0
"""Door: the command `farflung test`."""

import sys

from farflung.compat.absent import __getattr__ as __getattr__
from farflung.launch.commands import test_command as test_command, test_command_parser as test_command_parser
from farflung.launch.main import main

if __name__ == "__main__":
    main(["test", *sys.argv[1:]])
