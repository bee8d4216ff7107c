# SPDX-License-Identifier: Apache-2.0
"""Door: where programs look for configuration files."""

from farflung.base.absent import get_config_parser
from farflung.config.cluster import (
    ClusterConfig,
    cache_dir,
    default_config_file,
    default_json_config_file,
    default_yaml_config_file,
    load_config_from_file,
)

__all__ = [
    "ClusterConfig",
    "cache_dir",
    "default_config_file",
    "default_json_config_file",
    "default_yaml_config_file",
    "get_config_parser",
    "load_config_from_file",
]
