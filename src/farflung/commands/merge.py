# SPDX-License-Identifier: Apache-2.0
"""Door: the command that merges shards, which is not there: use `farflung.utils.merge_fsdp_weights`."""

from farflung.compat.absent import merge_command as merge_command, merge_command_parser as merge_command_parser
from farflung.launch.main import main

if __name__ == "__main__":
    main(["merge-weights"])
