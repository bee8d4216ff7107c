# SPDX-License-Identifier: Apache-2.0
"""`python -m laconic` is the command `laconic`."""

from laconic.launch.main import main

if __name__ == "__main__":
    main()
