# SPDX-License-Identifier: Apache-2.0
"""Door: Accelerate's test of an installation."""

from farflung.compat.absent import __getattr__ as __getattr__
from farflung.launch.main import main

if __name__ == "__main__":
    main(["test"])
