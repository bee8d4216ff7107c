# SPDX-License-Identifier: Apache-2.0
"""Door: estimating memory, which is not there."""

from farflung.compat.absent import (
    add_timm_hub_prefix as add_timm_hub_prefix,
    check_has_model as check_has_model,
    create_ascii_table as create_ascii_table,
    create_empty_model as create_empty_model,
    estimate_command as estimate_command,
    estimate_command_parser as estimate_command_parser,
    estimate_training_usage as estimate_training_usage,
    gather_data as gather_data,
    verify_on_hub as verify_on_hub,
)
from farflung.launch.main import main

if __name__ == "__main__":
    main(["estimate-memory"])
