# SPDX-License-Identifier: Apache-2.0
"""Which libraries are installed on this machine, and which devices torch finds.

No library is imported to find out whether it is there. Other vendors' devices come to torch by a library of theirs;
what such a device then can do is for the library to say.
"""

from __future__ import annotations

import functools
import logging
import platform
import subprocess
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

from farflung.base.optional import compare_release, compare_versions, is_installed
from farflung.compat import defined_in
from farflung.trackers.tracking import has_client

_logger = logging.getLogger("farflung.utils.environment")


def _has_device(kind: str) -> bool:
    """Return whether torch has devices of this kind, which a library of their vendor may have brought it."""
    module = getattr(torch, kind, None)
    try:
        return module is not None and bool(module.is_available())
    except (AttributeError, RuntimeError):  # a driver that finds no device may raise instead
        return False


def is_torch_version(operation: str, version: str) -> bool:
    """Return whether torch's version stands in the relation `operation` (`>=`, `<` ...) to `version`."""
    return compare_versions("torch", operation, version)


def _probe(what: str, answer: Callable[[], bool]) -> Callable[[], bool]:
    """Return a probe: a function that gives `answer()`, with a docstring that says `what` it asks."""

    def probe() -> bool:
        return answer()

    probe.__doc__ = f"Return whether {what}."
    return probe


def _library(module: str, *packages: str, version: str = "") -> Callable[[], bool]:
    """Return the probe of a library, and of a `version` of it if that is given (`>= 0.8.0`)."""
    words = version.split()
    return _probe(
        f"{module} is installed{version and f', {version}'}",
        lambda: is_installed(module, *packages) and (not words or compare_versions(module, *words)),
    )


def _tracker(name: str) -> Callable[[], bool]:
    return _probe(f"the library of the tracker {name} is installed", lambda: has_client(name))


is_torch_distributed_available = _probe("torch was built with `torch.distributed`", dist.is_available)
is_xccl_available = _probe(
    "torch was built with the collectives of Intel's GPUs",
    lambda: bool(getattr(dist.distributed_c10d, "is_xccl_available", bool)()),
)
is_weights_only_available = _probe(
    "`torch.load` takes `weights_only`: with each torch that Farflung runs on", lambda: True
)

# ---- libraries

is_aim_available = _library("aim", version="< 4.0.0")
is_amdsmi_available = _library("amdsmi")
is_boto3_available = _library("boto3")
is_clearml_available = _library("clearml")
is_comet_ml_available = _library("comet_ml")
is_datasets_available = _library("datasets")
is_deepspeed_available = _library("deepspeed")
is_dvclive_available = _library("dvclive")
is_import_timer_available = _library("import_timer")
is_lomo_available = _library("lomo_optim")
is_matplotlib_available = _library("matplotlib")
is_megatron_lm_available = _probe("Farflung trains with Megatron-LM: it never does", lambda: False)
is_mlflow_available = _tracker("mlflow")
is_msamp_available = _library("msamp", "ms-amp")
is_pandas_available = _library("pandas")
is_peft_available = _library("peft")
is_pippy_available = _probe(
    "torch has pipelines of its own: from 2.4 on; Farflung does not use them", lambda: is_torch_version(">=", "2.4.0")
)
is_pynvml_available = _library("pynvml", "pynvml", "nvidia-ml-py")
is_pytest_available = _library("pytest")
is_sagemaker_available = _library("sagemaker")
is_schedulefree_available = _library("schedulefree")
is_swanlab_available = _library("swanlab")
is_tensorboard_available = _tracker("tensorboard")
is_timm_available = _library("timm")
is_torchao_available = _library("torchao", version=">= 0.6.1")
is_torchdata_available = _library("torchdata")
is_torchdata_stateful_dataloader_available = _library("torchdata", version=">= 0.8.0")
is_torchvision_available = _library("torchvision")
is_tqdm_available = _library("tqdm")
is_trackio_available = _tracker("trackio")
is_transformer_engine_available = _library("transformer_engine", "transformer-engine")
is_transformer_engine_mxfp8_available = _probe(
    "Farflung trains in TransformerEngine's MXFP8: it never does", lambda: False
)
is_transformers_available = _library("transformers")
is_triton_available = _probe(
    "triton is installed", lambda: is_installed("triton", *(["triton", "triton-xpu"] if is_xpu_available() else []))
)
is_wandb_available = _tracker("wandb")


def is_numpy_available(min_version: str = "1.25.0") -> bool:
    """Return whether numpy is installed, and not older than `min_version`."""
    return is_installed("numpy") and compare_versions("numpy", ">=", min_version)


def is_bnb_available(min_version: str | None = None) -> bool:
    """Return whether bitsandbytes is installed, and not older than `min_version`."""
    return is_installed("bitsandbytes") and compare_versions("bitsandbytes", ">=", min_version or "0")


is_4bit_bnb_available = _library("bitsandbytes", version=">= 0.39.0")
is_8bit_bnb_available = _library("bitsandbytes", version=">= 0.37.2")
is_bitsandbytes_multi_backend_available = _library("bitsandbytes", version=">= 0.46.0")
is_fp8_available = _probe(
    "a library for fp8 is installed: MS-AMP, TransformerEngine or torchao",
    lambda: is_msamp_available() or is_transformer_engine_available() or is_torchao_available(),
)


# ---- devices


def _device(kind: str, what: str) -> Callable[..., bool]:
    def probe(check_device: bool = False) -> bool:
        return _has_device(kind)

    probe.__doc__ = f"Return whether there is {what}."
    return probe


is_cuda_available = _probe("there is an NVIDIA or AMD GPU", lambda: torch.cuda.is_available())
is_rocm_available = _probe("there is an AMD GPU", lambda: torch.version.hip is not None and torch.cuda.is_available())


def is_mps_available(min_version: str = "1.12") -> bool:
    """Return whether there is an Apple GPU, and torch is not older than `min_version`."""
    return is_torch_version(">=", min_version) and torch.backends.mps.is_available()


def is_hpu_available(init_hccl: bool = False) -> bool:
    """Return whether there is a Gaudi accelerator (`init_hccl` is unused)."""
    return _has_device("hpu")


is_mlu_available = _device("mlu", "a Cambricon accelerator")
is_musa_available = _device("musa", "a Moore Threads GPU")
is_neuron_available = _device("neuron", "a Trainium or Inferentia accelerator")
is_npu_available = _device("npu", "an Ascend accelerator")
is_sdaa_available = _device("sdaa", "a Tecorigin accelerator")
is_xpu_available: Callable[..., bool] = _device("xpu", "an Intel GPU, and a torch that trains on it")
is_habana_gaudi1 = _probe("the accelerator is a Gaudi of the first generation: Farflung can't tell", lambda: False)
is_fp16_available = _probe("fp16 can be trained in: always", lambda: True)


def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Return whether Farflung trains through XLA: it never does."""
    return False


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Return whether this machine's first device computes in bf16 (`ignore_tpu` is unused: there is no TPU here)."""
    for is_there, kind in ((is_cuda_available, "cuda"), (is_mlu_available, "mlu"), (is_xpu_available, "xpu")):
        if is_there():
            return bool(getattr(torch, kind).is_bf16_supported())
    return not is_mps_available() or torch.backends.mps.is_macos_or_newer(14, 0)


def get_current_device_type() -> tuple[str, str]:
    """Return the kind of this machine's accelerators and the word for several of them, without touching any.

    If there is none, they are `cuda` and `MULTI_GPU`.
    """
    for kind in ("mlu", "sdaa", "musa", "npu", "hpu", "xpu", "neuron"):
        if _has_device(kind):
            return kind, f"MULTI_{kind.upper()}"
    return "cuda", "MULTI_GPU"


def are_libraries_initialized(*library_names: str) -> list[str]:
    """Return those of `library_names` that this process has imported."""
    return [name for name in library_names if name in sys.modules]


# ---- NVIDIA's driver, cores and the kernel, asked without waking a GPU if that can be

_OLDEST_KERNEL = "5.5.0"  # processes hang on older ones, according to Accelerate
_WITHOUT_P2P = "RTX 40"  # GPUs that can neither talk to each other nor to InfiniBand ...
_DRIVER_WITH_P2P = "550.40.07"  # ... until this driver


def _nvidia_smi(question: str) -> list[str]:
    """Return the answer of nvidia-smi, one line a GPU."""
    command = ["nvidia-smi", f"--query-gpu={question}", "--format=csv,noheader"]
    return subprocess.check_output(command, text=True).strip().splitlines()


def get_gpu_info() -> tuple[list[str], int]:
    """Return the names of this machine's NVIDIA GPUs and how many they are; FileNotFoundError without nvidia-smi."""
    names = [line.split(",")[1].strip() for line in _nvidia_smi("count,name")]
    return names, len(names)


def get_driver_version() -> str:
    """Return the version of NVIDIA's driver; FileNotFoundError without nvidia-smi."""
    return _nvidia_smi("driver_version")[0]


def check_cuda_p2p_ib_support() -> bool:
    """Return whether several GPUs of this machine can talk to each other and to InfiniBand; True if it is not known."""
    try:
        names, count = get_gpu_info()
        if count > 1 and any(_WITHOUT_P2P in name for name in names):
            return compare_release(get_driver_version(), ">=", _DRIVER_WITH_P2P)
    except (OSError, subprocess.SubprocessError, LookupError):
        pass
    return True


@functools.lru_cache
def check_cuda_fp8_capability() -> bool:
    """Return whether the first GPU computes in fp8: compute capability 8.9 or higher."""
    return torch.cuda.get_device_capability() >= (8, 9)


def check_os_kernel() -> None:
    """Log a warning if this machine's Linux is so old that processes are known to hang."""
    info = platform.uname()
    if info.system == "Linux" and compare_release(info.release, "<", _OLDEST_KERNEL):
        logger = logging.getLogger("farflung.utils.other")
        logger.warning(f"Linux {info.release} is older than {_OLDEST_KERNEL}, so processes may hang.")


__all__ = defined_in(globals())

for _name in __all__:  # so that `help` and pickle find each by its name
    globals()[_name].__name__ = globals()[_name].__qualname__ = _name
