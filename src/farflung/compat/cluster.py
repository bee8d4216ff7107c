# SPDX-License-Identifier: Apache-2.0
"""A configuration file as an object, in Accelerate's words."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

from farflung.base.enums import DistributedType
from farflung.base.errors import ConfigError
from farflung.base.files import atomic_file
from farflung.config.files import BLOCKS, read_file
from farflung.config.launch import FIELDS
from farflung.config.places import find_file, own_file

# Where `farflung config` writes, and what is read if no file is named.
default_yaml_config_file = default_config_file = str(own_file())
default_json_config_file = str(own_file().with_suffix(".json"))
cache_dir = str(own_file().parent)


class ComputeEnvironment(str, Enum):
    """Where a run is started."""

    LOCAL_MACHINE = "LOCAL_MACHINE"
    AMAZON_SAGEMAKER = "AMAZON_SAGEMAKER"


class SageMakerDistributedType(str, Enum):
    """How SageMaker distributes a run."""

    NO = "NO"
    DATA_PARALLEL = "DATA_PARALLEL"
    MODEL_PARALLEL = "MODEL_PARALLEL"


@dataclass
class BaseConfig:
    """What all configuration files say."""

    compute_environment: ComputeEnvironment
    distributed_type: DistributedType
    mixed_precision: str
    use_cpu: bool
    debug: bool

    def __post_init__(self) -> None:
        self.compute_environment = ComputeEnvironment(self.compute_environment)
        self.distributed_type = DistributedType(self.distributed_type)

    def to_dict(self) -> dict[str, Any]:
        """Return what has a value, in words and numbers."""
        values = {name: getattr(value, "value", value) for name, value in asdict(self).items()}
        return {name: value for name, value in values.items() if value not in (None, {})}

    def to_yaml_file(self, yaml_file: str | Path) -> None:
        with atomic_file(yaml_file) as path:
            path.write_text(yaml.safe_dump(self.to_dict()), encoding="utf-8")

    def to_json_file(self, json_file: str | Path) -> None:
        with atomic_file(json_file) as path:
            path.write_text(json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n", encoding="utf-8")


@dataclass
class ClusterConfig(BaseConfig):
    """What a configuration file says of `farflung launch`, with the defaults for what it leaves out."""

    compute_environment: ComputeEnvironment = ComputeEnvironment.LOCAL_MACHINE
    distributed_type: DistributedType = DistributedType.NO
    mixed_precision: str = "no"
    use_cpu: bool = False
    debug: bool = False
    num_processes: int | None = None
    machine_rank: int = 0
    num_machines: int = 1
    gpu_ids: str | None = None
    main_process_ip: str | None = None
    main_process_port: int | None = None
    rdzv_backend: str | None = "static"
    same_network: bool = False
    main_training_function: str = "main"
    enable_cpu_affinity: bool = False
    downcast_bf16: bool = False
    dynamo_config: dict[str, Any] = field(default_factory=dict)
    fsdp_config: dict[str, Any] = field(default_factory=dict)
    parallelism_config: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_yaml_file(cls, yaml_file: str | Path | None = None) -> ClusterConfig:
        """Read a file, by default the one that `farflung launch` would read."""
        path = find_file(None if yaml_file is None else str(yaml_file))
        if path is None:
            raise ConfigError("There is no configuration file. `farflung config` writes one.")
        values = {name: stated.value for name, stated in read_file(path)[0].items()}
        known = cls.__dataclass_fields__
        settings = {entry.name: values.get(entry.name, entry.default) for entry in FIELDS if entry.name in known}
        blocks = {
            block: {name: value for name, value in values.items() if name.startswith(prefix)}
            for block, prefix in BLOCKS.items()
            if block in known
        }
        return cls(distributed_type=_kind(values), **blocks, **settings)  # type: ignore[arg-type]

    from_json_file = from_yaml_file  # YAML reads JSON


def _kind(said: dict[str, Any]) -> DistributedType:
    if said.get("use_fsdp"):
        return DistributedType.FSDP
    if (said.get("num_processes") or 0) < 2 and (said.get("num_machines") or 1) < 2:
        return DistributedType.MULTI_GPU if said.get("multi_gpu") else DistributedType.NO
    return DistributedType.MULTI_CPU if said.get("use_cpu") else DistributedType.MULTI_GPU


def load_config_from_file(config_file: str | Path | None = None) -> ClusterConfig:
    """Read a configuration file; see `ClusterConfig.from_yaml_file`."""
    return ClusterConfig.from_yaml_file(config_file)
