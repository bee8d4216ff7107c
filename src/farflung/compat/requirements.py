# SPDX-License-Identifier: Apache-2.0
"""Accelerate's decorators of tests that need something: without it the test is skipped, and says what it needs."""

from __future__ import annotations

import unittest
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from farflung.base.devices import current_accelerator
from farflung.compat import probes
from farflung.compat.variables import parse_flag_from_env
from farflung.tracking.tracking import get_available_trackers


def _nothing() -> int:
    return 0


def get_backend() -> tuple[str, int, Callable[[], int]]:
    """Return the kind of this machine's accelerators (or `cpu`), their number, and what tells the memory in use."""
    device = current_accelerator()
    if device is None:
        return "cpu", 1, _nothing
    module: Any = torch.get_device_module(device)
    used: Callable[[], int] = getattr(module, "memory_allocated", getattr(module, "current_allocated_memory", _nothing))
    return device.type, torch.accelerator.device_count(), used


torch_device, device_count, memory_allocated_func = get_backend()


def _needs(what: str, is_there: bool) -> Callable[[Any], Any]:
    def require(test_case: Any) -> Any:
        return unittest.skipUnless(is_there, f"needs {what}")(test_case)

    return require


def skip(test_case: Any) -> Any:
    """Skip a test."""
    return unittest.skip("Test was skipped")(test_case)


def slow(test_case: Any) -> Any:
    """Skip a test unless the environment variable `RUN_SLOW` says yes."""
    return unittest.skipUnless(parse_flag_from_env("RUN_SLOW"), "test is slow")(test_case)


def run_first(test_case: Any) -> Any:
    """Mark a test as one that pytest-order runs first."""
    import pytest

    return pytest.mark.order(1)(test_case)


def require_torch_min_version(test_case: Any = None, version: str | None = None) -> Any:
    """Skip a test where torch is older than `version`."""
    if test_case is None:
        return partial(require_torch_min_version, version=version)
    return _needs(f"torch {version}", probes.is_torch_version(">=", str(version)))(test_case)


require_aim = _needs("aim", probes.is_aim_available())
require_bnb = _needs("bitsandbytes", probes.is_bnb_available())
require_clearml = _needs("clearml", probes.is_clearml_available())
require_comet_ml = _needs("comet_ml", probes.is_comet_ml_available())
require_cpu = _needs("a machine without accelerators", torch_device == "cpu")
require_cuda = _needs("an NVIDIA or AMD GPU", probes.is_cuda_available())
require_cuda_or_hpu = _needs("an NVIDIA or AMD GPU or a Gaudi", probes.is_cuda_available() or probes.is_hpu_available())
require_cuda_or_xpu = _needs("an NVIDIA, AMD or Intel GPU", probes.is_cuda_available() or probes.is_xpu_available())
require_datasets = _needs("datasets", probes.is_datasets_available())
require_deepspeed = _needs("deepspeed", probes.is_deepspeed_available())
require_dvclive = _needs("dvclive", probes.is_dvclive_available())
require_fp16 = _needs("fp16", probes.is_fp16_available())
require_fp8 = _needs("a library for fp8", probes.is_fp8_available())
require_fsdp2 = _needs("torch 2.6 or newer", probes.is_torch_version(">=", "2.6.0"))
require_huggingface_suite = _needs(
    "transformers and datasets", probes.is_transformers_available() and probes.is_datasets_available()
)
require_import_timer = _needs("import_timer", probes.is_import_timer_available())
require_matplotlib = _needs("matplotlib", probes.is_matplotlib_available())
require_mlflow = _needs("mlflow", probes.is_mlflow_available())
require_mlu = _needs("an MLU", probes.is_mlu_available())
require_mps = _needs("an Apple GPU", probes.is_mps_available())
require_multi_device = _needs("several accelerators", device_count > 1)
require_multi_gpu = _needs("several NVIDIA or AMD GPUs", torch.cuda.device_count() > 1)
require_multi_gpu_or_xpu = _needs(
    "several NVIDIA, AMD or Intel GPUs", torch_device in ("cuda", "xpu") and device_count > 1
)
require_multi_xpu = _needs("several Intel GPUs", torch.xpu.device_count() > 1)
require_musa = _needs("a MUSA", probes.is_musa_available())
require_neuron = _needs("a Neuron core", probes.is_neuron_available())
require_non_cpu = _needs("an accelerator", torch_device != "cpu")
require_non_hpu = _needs("another device than a Gaudi", torch_device != "hpu")
require_non_torch_xla = _needs("a machine without XLA", not probes.is_torch_xla_available())
require_non_xpu = _needs("another device than an Intel GPU", torch_device != "xpu")
require_npu = _needs("an NPU", probes.is_npu_available())
require_pandas = _needs("pandas", probes.is_pandas_available())
require_peft = _needs("peft", probes.is_peft_available())
require_pippy = _needs("PiPPy", probes.is_pippy_available())
require_schedulefree = _needs("schedulefree", probes.is_schedulefree_available())
require_sdaa = _needs("an SDAA", probes.is_sdaa_available())
require_single_device = _needs("exactly one accelerator", torch_device != "cpu" and device_count == 1)
require_single_gpu = _needs("exactly one NVIDIA or AMD GPU", torch.cuda.device_count() == 1)
require_single_xpu = _needs("exactly one Intel GPU", torch.xpu.device_count() == 1)
require_swanlab = _needs("swanlab", probes.is_swanlab_available())
require_tensorboard = _needs("tensorboard", probes.is_tensorboard_available())
require_timm = _needs("timm", probes.is_timm_available())
require_torchao = _needs("torchao", probes.is_torchao_available())
require_torchdata_stateful_dataloader = _needs(
    "torchdata with its stateful loader", probes.is_torchdata_stateful_dataloader_available()
)
require_torchvision = _needs("torchvision", probes.is_torchvision_available())
require_tp = _needs("torch 2.3 and transformers", probes.is_transformers_available())
require_tpu = _needs("a TPU", probes.is_torch_xla_available(check_is_tpu=True))
require_trackers = _needs("a tracker", len(get_available_trackers()) > 1)  # one of them needs no library
require_trackio = _needs("trackio", probes.is_trackio_available())
require_transformer_engine = _needs("transformer_engine", probes.is_transformer_engine_available())
require_transformer_engine_mxfp8 = _needs("TransformerEngine's MXFP8", probes.is_transformer_engine_mxfp8_available())
require_transformers = _needs("transformers", probes.is_transformers_available())
require_triton = _needs("triton", probes.is_triton_available())
require_wandb = _needs("wandb", probes.is_wandb_available())
require_xpu = _needs("an Intel GPU", probes.is_xpu_available())

__all__ = ["device_count", "get_backend", "memory_allocated_func", "run_first", "skip", "slow", "torch_device"]
__all__ += [name for name in globals() if name.startswith("require_")]
