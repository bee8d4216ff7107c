# SPDX-License-Identifier: Apache-2.0
"""Door: estimating memory, which is not there."""

from farflung.compat.absent import __getattr__ as __getattr__
from farflung.launch.main import main

if __name__ == "__main__":
    main(["estimate-memory"])
