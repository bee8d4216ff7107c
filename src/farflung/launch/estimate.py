# SPDX-License-Identifier: Apache-2.0
"""`farflung estimate`: the memory that a published model needs, from its configuration alone.

torch is loaded when the arguments have been read.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farflung.base.errors import ConfigError
from farflung.base.lazy import LazyModule
from farflung.base.optional import is_installed
from farflung.launch.commands import command_parser, parsed_command

if TYPE_CHECKING:
    from torch import nn

    from farflung.big_model import device_map, tensors
else:
    device_map = LazyModule("farflung.big_model.device_map")
    tensors = LazyModule("farflung.big_model.tensors")

__all__ = [
    "add_timm_hub_prefix",
    "create_empty_model",
    "estimate_command",
    "estimate_command_parser",
    "estimate_training_usage",
    "gather_data",
    "verify_on_hub",
]

_PARTS = {"float32": 1, "float16": 2, "int8": 4, "int4": 8}  # of an fp32 value's bytes


def estimate_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of `farflung estimate`; with `subparsers` it is their command `estimate-memory`."""
    about = "Estimate the memory that a model needs to be loaded, and to be trained with Adam. No weights are loaded."
    parser = command_parser("estimate", about, estimate_command, subparsers, accelerates="estimate-memory")
    parser.add_argument("model_name", help="Name of a model on the Hugging Face Hub, or a folder that has its config.")
    parser.add_argument(
        *("--library_name", "--library-name"),
        choices=("transformers", "timm"),
        help="The library of the model. [what the hub says; transformers for a folder]",
    )
    parser.add_argument("--dtypes", nargs="+", choices=_PARTS, default=[*_PARTS], help="Types of its values. [all]")
    parser.add_argument(
        *("--trust_remote_code", "--trust-remote-code"),
        action="store_true",
        help="Run the Python code that comes with the model, which may do anything on this machine.",
    )
    return parser


def estimate_command(args: argparse.Namespace) -> None:
    """Print a table of what `gather_data` returns."""
    rows = [["dtype", "largest layer", "total size", "training with Adam"]]
    for dtype, *sizes, training in gather_data(args):
        needed = max(training.values())
        rows.append([dtype, *(f"{size / 2**20:,.1f}" if size >= 0 else "-" for size in (*sizes, needed))])
    print(f"Memory of {args.model_name} in MiB, without activations:")
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)))


def gather_data(args: argparse.Namespace) -> list[list[Any]]:
    """Return for each of `args.dtypes`: its name, bytes of the largest layer, of all, and what training needs.

    `args` are from `estimate_command_parser`. Raises what `create_empty_model` raises.
    """
    model = create_empty_model(args.model_name, args.library_name, args.trust_remote_code)
    total, (largest, _) = device_map.calculate_maximum_sizes(model)
    return [
        [dtype, largest / _PARTS[dtype], total / _PARTS[dtype], estimate_training_usage(int(total), dtype)]
        for dtype in args.dtypes
    ]


def estimate_training_usage(bytes: int, mixed_precision: str, msamp_config: str | None = None) -> dict[str, int]:
    """Return the bytes of a model of `bytes` in fp32 that trains with Adam, by what has them; -1: it can't train so.

    `step` is the most at one time: all of them. Mixed precision needs as much, as it keeps weights, gradients and
    moments in fp32; its copies of weights in half precision come and go with the activations.
    """
    if mixed_precision in ("float32", "float16", "bfloat16") or (mixed_precision == "fp8" and msamp_config is None):
        return {"model": bytes, "gradients": bytes, "optimizer": 2 * bytes, "step": 4 * bytes}
    return dict.fromkeys(("model", "gradients", "optimizer", "step"), -1)


def create_empty_model(
    model_name: str, library_name: str | None, trust_remote_code: bool = False, access_token: str | None = None
) -> nn.Module:
    """Return a model without memory, on torch's device `meta`, made from its configuration.

    Args:
        model_name: on the Hugging Face Hub, or a folder with a `config.json`.
        library_name: `transformers` or `timm`; None: what the hub says.
        trust_remote_code: run the code that comes with the model.
        access_token: for private and gated models.

    Raises:
        OSError: there is no such model, it is gated, or the hub can't be reached.
        ConfigError: its library is not known, or not supported.
        RuntimeError: the model has no configuration that its library reads.
        ImportError: its library is not installed.
    """
    library = library_name or ("transformers" if Path(model_name).is_dir() else _library_of(model_name, access_token))
    if library not in ("transformers", "timm"):
        raise ConfigError(f"{model_name} is a model of {library}; only transformers and timm are supported.")
    if not is_installed(library):
        raise ImportError(f"{model_name} is a model of {library}. Install it: pip install {library}")
    make = _of_transformers if library == "transformers" else _of_timm
    with tensors.init_empty_weights():
        return make(model_name, trust_remote_code, access_token)


def verify_on_hub(repo: str, token: str | None = None) -> Any:
    """Return what the hub knows of a model; `gated` if it may not be read, `repo` if there is none."""
    if not is_installed("huggingface_hub"):
        raise ImportError("The hub is asked by huggingface_hub. Install it: pip install huggingface_hub")
    import huggingface_hub as hub
    import huggingface_hub.errors

    try:
        return hub.model_info(repo, token=token)
    except hub.errors.GatedRepoError:
        return "gated"
    except hub.errors.RepositoryNotFoundError:
        return "repo"
    except OSError:  # no network
        return "gated"


def _library_of(model_name: str, token: str | None) -> str:
    found = verify_on_hub(model_name, token)
    if found == "gated":
        raise OSError(f"{model_name} is gated, or the hub can't be reached. Log in with `hf auth login`.")
    if found == "repo":
        raise OSError(f"There is no model {model_name} on the hub that you may read. Log in with `hf auth login`.")
    library = getattr(found, "library_name", None)
    if not library:
        raise ConfigError(f"The hub does not name the library of {model_name}. Give --library_name.")
    return str(library)


def _of_transformers(name: str, trust_remote_code: bool, token: str | None) -> nn.Module:
    import torch
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code, token=token)
    except (OSError, ValueError) as error:
        if isinstance(error, ValueError) and "Unrecognized model" not in str(error):  # --trust_remote_code is missing
            raise
        raise RuntimeError(f"transformers finds no configuration of {name}: {error}") from error
    custom = getattr(config, "auto_map", None) or {}
    maker = next((key for key in custom if key.startswith("AutoModelFor")), "AutoModel")
    model: nn.Module = getattr(transformers, maker).from_config(
        config, dtype=torch.float32, trust_remote_code=trust_remote_code
    )
    return model


def add_timm_hub_prefix(model_name: str) -> str:
    """Return the name by which timm finds a model: `hf-hub:` stands before that of a repository on the hub."""
    return f"hf-hub:{model_name}" if "/" in model_name and ":" not in model_name else model_name


def _of_timm(name: str, trust_remote_code: bool, token: str | None) -> nn.Module:
    import timm  # type: ignore[import-not-found]

    try:
        model: nn.Module = timm.create_model(add_timm_hub_prefix(name), pretrained=False)
    except (RuntimeError, KeyError, OSError) as error:
        raise RuntimeError(f"timm finds no model {name}: {error}") from error
    return model


estimate = parsed_command("estimate", estimate_command_parser, estimate_command)
