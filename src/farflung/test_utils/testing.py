# SPDX-License-Identifier: Apache-2.0
"""Door: helpers for tests."""

from farflung.compat.commands import (
    DEFAULT_LAUNCH_COMMAND as DEFAULT_LAUNCH_COMMAND,
    MockingTestCase as MockingTestCase,
    SubprocessCallException as SubprocessCallException,
    TempDirTestCase as TempDirTestCase,
    assert_exception as assert_exception,
    capture_call_output as capture_call_output,
    execute_subprocess_async as execute_subprocess_async,
    get_launch_command as get_launch_command,
    get_torch_dist_unique_port as get_torch_dist_unique_port,
    path_in_accelerate_package as path_in_accelerate_package,
    pytest_xdist_worker_id as pytest_xdist_worker_id,
    run_command as run_command,
)
from farflung.compat.probes import is_hpu_available as is_hpu_available, is_xpu_available as is_xpu_available
from farflung.compat.requirements import *
from farflung.compat.testing import (
    AccelerateTestCase as AccelerateTestCase,
    are_the_same_tensors as are_the_same_tensors,
)
from farflung.compat.variables import parse_flag_from_env as parse_flag_from_env
