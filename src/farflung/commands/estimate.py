# SPDX-License-Identifier: Apache-2.0
"""Door: the command `farflung estimate`."""

import sys

from farflung.compat.absent import __getattr__ as __getattr__
from farflung.launch.estimate import *
from farflung.launch.main import main

if __name__ == "__main__":
    main(["estimate", *sys.argv[1:]])
