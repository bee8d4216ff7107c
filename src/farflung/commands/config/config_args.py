# SPDX-License-Identifier: Apache-2.0
"""Door: configuration files as objects."""

from farflung.compat.absent import __getattr__ as __getattr__
from farflung.compat.cluster import (
    BaseConfig as BaseConfig,
    ClusterConfig as ClusterConfig,
    cache_dir as cache_dir,
    default_config_file as default_config_file,
    default_json_config_file as default_json_config_file,
    default_yaml_config_file as default_yaml_config_file,
    load_config_from_file as load_config_from_file,
)
