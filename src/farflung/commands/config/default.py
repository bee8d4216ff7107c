# SPDX-License-Identifier: Apache-2.0
"""Door: writing a configuration file."""

from farflung.compat.absent import (
    default_command_parser as default_command_parser,
    default_config_command as default_config_command,
)
from farflung.compat.cluster import default_json_config_file as default_json_config_file
from farflung.launch.ask import write_basic_config as write_basic_config
