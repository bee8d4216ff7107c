# SPDX-License-Identifier: Apache-2.0
"""Door: the command `farflung env`."""

import sys

from farflung.compat.absent import env_command as env_command, env_command_parser as env_command_parser
from farflung.launch.main import main

if __name__ == "__main__":
    main(["env", *sys.argv[1:]])
