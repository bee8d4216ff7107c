# SPDX-License-Identifier: Apache-2.0
"""What this machine has: libraries, answered from what is installed, and devices, answered by torch.

No library is imported to find out whether it is there. Other vendors' devices come to torch by a library of theirs;
what such a device then can do is for the library to say.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, metadata
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist

from farflung.base.optional import compare_versions


def current_accelerator() -> torch.device | None:
    """Return the kind of accelerator that this machine has, or None; torch before 2.7 also names one that is absent."""
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def is_installed(module: str, *packages: str) -> bool:
    """Say whether `module` can be imported and one of `packages` (by default, one of its name) has it.

    A folder that happens to bear the name of a library belongs to no package.
    """
    try:
        if find_spec(module) is None:
            return False
    except (ImportError, ValueError):  # the parent of a submodule is missing, or a module without a spec was put there
        return False
    for package in packages or (module,):
        try:
            metadata(package)
            return True
        except PackageNotFoundError:
            continue
    return False


def _is_version(library: str, operation: str, version: str) -> bool:
    return is_installed(library) and compare_versions(library, operation, version)


def is_torch_version(operation: str, version: str) -> bool:
    """Say whether torch's version stands in the relation `operation` (`>=`, `<` ...) to `version`."""
    return compare_versions("torch", operation, version)


def is_numpy_available(min_version: str = "1.25.0") -> bool:
    """Say whether numpy is installed, and not older than `min_version`."""
    return _is_version("numpy", ">=", min_version)


def is_torch_distributed_available() -> bool:
    """Say whether torch was built with `torch.distributed`."""
    return dist.is_available()


def is_xccl_available() -> bool:
    """Say whether torch was built with the collectives of Intel's GPUs."""
    return bool(getattr(dist.distributed_c10d, "is_xccl_available", bool)())


def is_weights_only_available() -> bool:
    """Say whether `torch.load` takes `weights_only`: yes, with each torch that Farflung runs on."""
    return True


# ---- libraries


def is_aim_available() -> bool:
    """Say whether aim is installed, older than 4.0."""
    return _is_version("aim", "<", "4.0.0")


def is_amdsmi_available() -> bool:
    """Say whether amdsmi is installed."""
    return is_installed("amdsmi")


def is_boto3_available() -> bool:
    """Say whether boto3 is installed."""
    return is_installed("boto3")


def is_clearml_available() -> bool:
    """Say whether clearml is installed."""
    return is_installed("clearml")


def is_comet_ml_available() -> bool:
    """Say whether comet_ml is installed."""
    return is_installed("comet_ml")


def is_datasets_available() -> bool:
    """Say whether datasets is installed."""
    return is_installed("datasets")


def is_deepspeed_available() -> bool:
    """Say whether deepspeed is installed. Farflung does not use it."""
    return is_installed("deepspeed")


def is_dvclive_available() -> bool:
    """Say whether dvclive is installed."""
    return is_installed("dvclive")


def is_import_timer_available() -> bool:
    """Say whether import_timer is installed."""
    return is_installed("import_timer")


def is_lomo_available() -> bool:
    """Say whether lomo_optim is installed."""
    return is_installed("lomo_optim")


def is_matplotlib_available() -> bool:
    """Say whether matplotlib is installed."""
    return is_installed("matplotlib")


def is_megatron_lm_available() -> bool:
    """Say whether Farflung trains with Megatron-LM: it never does."""
    return False


def is_mlflow_available() -> bool:
    """Say whether mlflow, or its skinny form, is installed."""
    return is_installed("mlflow", "mlflow", "mlflow-skinny")


def is_msamp_available() -> bool:
    """Say whether MS-AMP is installed. Farflung does not use it."""
    return is_installed("msamp", "ms-amp")


def is_pandas_available() -> bool:
    """Say whether pandas is installed."""
    return is_installed("pandas")


def is_peft_available() -> bool:
    """Say whether peft is installed."""
    return is_installed("peft")


def is_pippy_available() -> bool:
    """Say whether torch has pipelines of its own: from 2.4 on. Farflung does not use them."""
    return is_torch_version(">=", "2.4.0")


def is_pynvml_available() -> bool:
    """Say whether pynvml is installed."""
    return is_installed("pynvml", "pynvml", "nvidia-ml-py")


def is_pytest_available() -> bool:
    """Say whether pytest is installed."""
    return is_installed("pytest")


def is_sagemaker_available() -> bool:
    """Say whether sagemaker is installed. Farflung does not use it."""
    return is_installed("sagemaker")


def is_schedulefree_available() -> bool:
    """Say whether schedulefree is installed."""
    return is_installed("schedulefree")


def is_swanlab_available() -> bool:
    """Say whether swanlab is installed."""
    return is_installed("swanlab")


def is_tensorboard_available() -> bool:
    """Say whether tensorboard or tensorboardX is installed."""
    return is_installed("tensorboard") or is_installed("tensorboardX")


def is_timm_available() -> bool:
    """Say whether timm is installed."""
    return is_installed("timm")


def is_torchao_available() -> bool:
    """Say whether torchao is installed, 0.6.1 or newer."""
    return _is_version("torchao", ">=", "0.6.1")


def is_torchdata_available() -> bool:
    """Say whether torchdata is installed."""
    return is_installed("torchdata")


def is_torchdata_stateful_dataloader_available() -> bool:
    """Say whether torchdata is installed, with its stateful loader: 0.8 or newer."""
    return _is_version("torchdata", ">=", "0.8.0")


def is_torchvision_available() -> bool:
    """Say whether torchvision is installed."""
    return is_installed("torchvision")


def is_tqdm_available() -> bool:
    """Say whether tqdm is installed."""
    return is_installed("tqdm")


def is_trackio_available() -> bool:
    """Say whether trackio is installed."""
    return is_installed("trackio")


def is_transformer_engine_available() -> bool:
    """Say whether TransformerEngine is installed. Farflung does not use it."""
    return is_installed("transformer_engine", "transformer-engine")


def is_transformer_engine_mxfp8_available() -> bool:
    """Say whether Farflung trains in TransformerEngine's MXFP8: it never does."""
    return False


def is_transformers_available() -> bool:
    """Say whether transformers is installed."""
    return is_installed("transformers")


def is_triton_available() -> bool:
    """Say whether triton is installed."""
    return is_installed("triton", "triton-xpu") if is_xpu_available() else is_installed("triton")


def is_wandb_available() -> bool:
    """Say whether wandb is installed."""
    return is_installed("wandb")


def is_bnb_available(min_version: str | None = None) -> bool:
    """Say whether bitsandbytes is installed, and not older than `min_version`."""
    return is_installed("bitsandbytes") if min_version is None else _is_version("bitsandbytes", ">=", min_version)


def is_4bit_bnb_available() -> bool:
    """Say whether bitsandbytes is installed, with 4-bit layers: 0.39 or newer."""
    return is_bnb_available("0.39.0")


def is_8bit_bnb_available() -> bool:
    """Say whether bitsandbytes is installed, with 8-bit layers: 0.37.2 or newer."""
    return is_bnb_available("0.37.2")


def is_bitsandbytes_multi_backend_available() -> bool:
    """Say whether bitsandbytes is installed, for devices of several vendors: 0.46 or newer."""
    return is_bnb_available("0.46.0")


def is_fp8_available() -> bool:
    """Say whether a library for fp8 is installed: MS-AMP, TransformerEngine or torchao."""
    return is_msamp_available() or is_transformer_engine_available() or is_torchao_available()


def torchao_required(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return `func`, which raises ImportError when it is called where torchao is not installed."""

    @functools.wraps(func)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if not is_torchao_available():
            raise ImportError(f"{func.__name__} needs torchao, 0.6.1 or newer: `pip install torchao`.")
        return func(*args, **kwargs)

    return checked


# ---- devices


def _has_device(kind: str) -> bool:
    """Say whether torch has devices of this kind, which a library of their vendor may have brought it."""
    module = getattr(torch, kind, None)
    try:
        return module is not None and bool(module.is_available())
    except (AttributeError, RuntimeError):  # a driver that finds no device may raise instead
        return False


def is_cuda_available() -> bool:
    """Say whether there is an NVIDIA or AMD GPU."""
    return torch.cuda.is_available()


def is_rocm_available() -> bool:
    """Say whether there is an AMD GPU."""
    return torch.version.hip is not None and torch.cuda.is_available()


def is_mps_available(min_version: str = "1.12") -> bool:
    """Say whether there is an Apple GPU, and torch is not older than `min_version`."""
    return is_torch_version(">=", min_version) and torch.backends.mps.is_available()


def is_xpu_available(check_device: bool = False) -> bool:
    """Say whether there is an Intel GPU, and a torch that trains on it: 2.7 or newer."""
    return is_torch_version(">", "2.6") and _has_device("xpu")


def is_hpu_available(init_hccl: bool = False) -> bool:
    """Say whether there is a Gaudi accelerator (`init_hccl` is unused)."""
    return _has_device("hpu")


def is_mlu_available(check_device: bool = False) -> bool:
    """Say whether there is a Cambricon accelerator."""
    return _has_device("mlu")


def is_musa_available(check_device: bool = False) -> bool:
    """Say whether there is a Moore Threads GPU."""
    return _has_device("musa")


def is_neuron_available(check_device: bool = False) -> bool:
    """Say whether there is a Trainium or Inferentia accelerator."""
    return _has_device("neuron")


def is_npu_available(check_device: bool = False) -> bool:
    """Say whether there is an Ascend accelerator."""
    return _has_device("npu")


def is_sdaa_available(check_device: bool = False) -> bool:
    """Say whether there is a Tecorigin accelerator."""
    return _has_device("sdaa")


def is_habana_gaudi1() -> bool:
    """Say whether the accelerator is a Gaudi of the first generation, which Farflung can't tell: no."""
    return False


def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Say whether Farflung trains through XLA: it never does."""
    return False


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Say whether this machine's first device computes in bf16 (`ignore_tpu` is unused: there is no TPU here)."""
    for is_there, kind in ((is_cuda_available, "cuda"), (is_mlu_available, "mlu"), (is_xpu_available, "xpu")):
        if is_there():
            return bool(getattr(torch, kind).is_bf16_supported())
    return not is_mps_available() or torch.backends.mps.is_macos_or_newer(14, 0)


def is_fp16_available() -> bool:
    """Say whether fp16 can be trained in: always."""
    return True


def get_current_device_type() -> tuple[str, str]:
    """Return the kind of this machine's accelerators and the word for several of them, without touching any.

    Where there is none, they are `cuda` and `MULTI_GPU`.
    """
    for kind in ("mlu", "sdaa", "musa", "npu", "hpu", "xpu", "neuron"):
        if _has_device(kind):
            return kind, f"MULTI_{kind.upper()}"
    return "cuda", "MULTI_GPU"


def are_libraries_initialized(*library_names: str) -> list[str]:
    """Return those of `library_names` that this process has imported."""
    return [name for name in library_names if name in sys.modules]
