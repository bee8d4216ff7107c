# SPDX-License-Identifier: Apache-2.0
"""Door: writing a configuration file."""

from farflung.compat.absent import __getattr__ as __getattr__
from farflung.compat.cluster import default_json_config_file as default_json_config_file
from farflung.launch.ask import write_basic_config as write_basic_config
