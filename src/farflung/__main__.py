# SPDX-License-Identifier: Apache-2.0
"""`python -m farflung` is the command `farflung`."""

from farflung.launch.main import main

if __name__ == "__main__":
    main()
