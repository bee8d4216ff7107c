# SPDX-License-Identifier: Apache-2.0
"""Door: the command that merges shards, which is not there: use `farflung.utils.merge_fsdp_weights`."""

from farflung.compat.absent import __getattr__ as __getattr__
from farflung.launch.main import main

if __name__ == "__main__":
    main(["merge-weights"])
