# SPDX-License-Identifier: Apache-2.0
"""Door: the command `farflung env`."""

import sys

from farflung.compat.absent import __getattr__ as __getattr__
from farflung.launch.main import main

if __name__ == "__main__":
    main(["env", *sys.argv[1:]])
