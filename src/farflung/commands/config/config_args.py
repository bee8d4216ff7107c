# SPDX-License-Identifier: Apache-2.0
"""Door: configuration files as objects."""

from farflung.base.absent import SageMakerConfig
from farflung.config.cluster import (
    BaseConfig,
    ClusterConfig,
    cache_dir,
    default_config_file,
    default_json_config_file,
    default_yaml_config_file,
    load_config_from_file,
)

__all__ = [
    "BaseConfig",
    "ClusterConfig",
    "SageMakerConfig",
    "cache_dir",
    "default_config_file",
    "default_json_config_file",
    "default_yaml_config_file",
    "load_config_from_file",
]
