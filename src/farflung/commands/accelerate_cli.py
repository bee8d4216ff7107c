# SPDX-License-Identifier: Apache-2.0
"""Door: the command."""

from farflung.launch.main import main as main

if __name__ == "__main__":
    main()
