# SPDX-License-Identifier: Apache-2.0
"""Door: estimating memory, which is not there."""

from farflung.compat.absent import (
    add_timm_hub_prefix,
    check_has_model,
    create_ascii_table,
    create_empty_model,
    estimate_command,
    estimate_command_parser,
    estimate_training_usage,
    gather_data,
    verify_on_hub,
)
from farflung.launch.main import main

__all__ = [
    "add_timm_hub_prefix",
    "check_has_model",
    "create_ascii_table",
    "create_empty_model",
    "estimate_command",
    "estimate_command_parser",
    "estimate_training_usage",
    "gather_data",
    "verify_on_hub",
]

if __name__ == "__main__":
    main(["estimate-memory"])
