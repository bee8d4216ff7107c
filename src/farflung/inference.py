# SPDX-License-Identifier: Apache-2.0
"""Door: pipeline parallelism for inference, which is not there."""

from farflung.compat.absent import (
    build_pipeline as build_pipeline,
    find_pippy_batch_size as find_pippy_batch_size,
    generate_device_map as generate_device_map,
    pippy_forward as pippy_forward,
    prepare_pippy as prepare_pippy,
)
