# SPDX-License-Identifier: Apache-2.0
"""Door: the command `farflung env`."""

import sys

from farflung.compat.absent import env_command, env_command_parser
from farflung.launch.main import main

__all__ = ["env_command", "env_command_parser"]

if __name__ == "__main__":
    main(["env", *sys.argv[1:]])
