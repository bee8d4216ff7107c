# SPDX-License-Identifier: Apache-2.0
"""Door: the launcher's commands and environments."""

from farflung.compat.absent import __getattr__ as __getattr__
from farflung.compat.launch_functions import (
    PrepareForLaunch as PrepareForLaunch,
    prepare_extend_env_parallelism_config as prepare_extend_env_parallelism_config,
    prepare_multi_gpu_env as prepare_multi_gpu_env,
    prepare_simple_launcher_cmd_env as prepare_simple_launcher_cmd_env,
)
from farflung.compat.private_names import _filter_args as _filter_args
from farflung.compat.variables import env_var_path_add as env_var_path_add
