# SPDX-License-Identifier: Apache-2.0
"""How models are sharded: Accelerate's `FullyShardedDataParallelPlugin`, whose version 2 (FSDP2) Farflung supports.

Settings of version 1 are translated if FSDP2 does the same, and refused by name if it does not. torch is loaded
only when a plugin needs an object of its, so that the launcher can check settings without it.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from farflung.base.checks import check_flag, check_whole, check_word, shown, wrong_type
from farflung.base.errors import ConfigError, Unsupported
from farflung.config import environ
from farflung.config.problems import Problems

if TYPE_CHECKING:
    from torch import dtype, nn
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy


WRAP_POLICIES = ("transformer_based_wrap", "size_based_wrap", "no_wrap")
STATE_DICT_TYPES = ("SHARDED_STATE_DICT", "FULL_STATE_DICT")
MIN_NUM_PARAMS = 100_000_000  # as Accelerate's launcher and torch's own policy have it

_log = logging.getLogger("farflung.utils.dataclasses")
_NAME = "FullyShardedDataParallelPlugin"
_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")  # from 1 on
_RESHARDS = {"FULL_SHARD": True, "SHARD_GRAD_OP": False}
_PREFETCHES = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")  # from 1 on
_IDLE = {"forward_prefetch": False, "limit_all_gathers": True}
_WHY_NOT = {
    "backward_prefetch": "FSDP2 always prefetches as BACKWARD_PRE does, unless set_modules_to_backward_prefetch on "
    "the prepared model's modules changes that",
    "forward_prefetch": "FSDP2 has it as set_modules_to_forward_prefetch on the prepared model's modules",
    "limit_all_gathers": "FSDP2 always limits them",
}
_NUMBERED_STATES = ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")  # from 1 on
_PRECISIONS = {"fp8": "bfloat16", "fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
_DTYPES = ("param_dtype", "reduce_dtype", "output_dtype")
# torch's own policies, which want arguments that the plugin has.
_TORCH_POLICIES = {
    "transformer_auto_wrap_policy": "transformer_based_wrap",
    "size_based_auto_wrap_policy": "size_based_wrap",
}


@dataclass
class FullyShardedDataParallelPlugin:
    """How `prepare` shards models by torch's `fully_shard`. Not frozen: trainers set a policy after making it.

    What is None is read from the environment: `FSDP_VERSION`, `FSDP_RESHARD_AFTER_FORWARD`, `FSDP_OFFLOAD_PARAMS` and
    so on, which `farflung launch --use_fsdp` sets. Each value is checked, and the attributes hold what was made of it.

    Args:
        fsdp_version: 2; with 1, the other settings are read as those of version 1 if they differ.
        sharding_strategy: version 1's word for `reshard_after_forward`: FULL_SHARD is True, SHARD_GRAD_OP is False.
        reshard_after_forward: free the gathered parameters between forward and backward; a number of ranks, which
            divides the shard axis, keeps them sharded over so many ranks only. True unless said otherwise.
        backward_prefetch, forward_prefetch, limit_all_gathers: version 1's, which change no result. FSDP2 prefetches as
            BACKWARD_PRE does and limits gathers; other values are read, and a warning says so.
        mixed_precision_policy: torch's `MixedPrecisionPolicy`; or a dictionary of its `param_dtype`, `reduce_dtype` and
            `output_dtype`; or one dtype for all three: `bf16`, `fp16`, `fp32`, or torch's own.
        auto_wrap_policy: which modules are sharded by themselves, inside the sharded model: `transformer_based_wrap`,
            `size_based_wrap`, `no_wrap`, or a function of (module, recurse, nonwrapped_numel) as torch's policies are.
        cpu_offload: keep parameters, gradients and optimizer states in host memory; or torch's `CPUOffloadPolicy`.
        ignored_modules: modules whose parameters are not sharded; or a regular expression that their names match.
        state_dict_type: what `save_state` writes: SHARDED_STATE_DICT (each rank its shards) or FULL_STATE_DICT (rank 0
            the whole). The latter is the default if `fsdp_version` is 1.
        state_dict_config, optim_state_dict_config: version 1's. Where a state dict is gathered is Farflung's choice.
        use_orig_params, sync_module_states: version 1's. FSDP2 always has the original parameters, and `prepare` always
            gives all ranks those of rank 0, so both ask for nothing.
        param_init_fn: version 1's, which can only be left out.
        activation_checkpointing: recompute the activations of the modules that `auto_wrap_policy` finds.
        activation_checkpointing_offload: keep the inputs of those modules in pinned host memory.
        cpu_ram_efficient_loading: transformers may leave out values on other ranks than rank 0 (how many depends on its
            release), and `prepare` hands out those of rank 0.
        transformer_cls_names_to_wrap: class names for `transformer_based_wrap`, in a list or with commas between; None
            takes those that the model names itself (`_no_split_modules`).
        min_num_params: the number of parameters from which `size_based_wrap` takes a module; 0 is the default.
            [100 million]

    Raises:
        ConfigError: a value that can't be, or two that contradict each other.
        Unsupported: a setting of version 1 that has no equal in FSDP2.
    """

    fsdp_version: int | None = None
    sharding_strategy: Any = None
    reshard_after_forward: Any = None
    backward_prefetch: Any = None
    mixed_precision_policy: Any = None
    auto_wrap_policy: Any = None
    cpu_offload: Any = None
    ignored_modules: Any = None
    state_dict_type: Any = None
    state_dict_config: Any = None
    optim_state_dict_config: Any = None
    limit_all_gathers: bool = True
    use_orig_params: bool | None = None
    param_init_fn: Callable[[nn.Module], None] | None = None
    sync_module_states: bool | None = None
    forward_prefetch: bool | None = None
    activation_checkpointing: bool | None = None
    activation_checkpointing_offload: bool | None = None
    cpu_ram_efficient_loading: bool | None = None
    transformer_cls_names_to_wrap: Any = None
    min_num_params: Any = None

    def __post_init__(self) -> None:
        problems, version = Problems(), 2

        def resolve(name: str, read: Callable[..., Any], *arguments: Any) -> None:
            with problems.caught():
                setattr(self, name, read(*arguments))

        with problems.caught():
            version = _version(self.fsdp_version)
        resolve("reshard_after_forward", _reshards, version, self.sharding_strategy, self.reshard_after_forward)
        self._check_version_1(problems)
        self.fsdp_version = 2
        if self.mixed_precision_policy is not None:
            resolve("mixed_precision_policy", _policy, self.mixed_precision_policy)
        with problems.caught():
            self._set_offload(self.cpu_offload)
        resolve("ignored_modules", _ignored, self.ignored_modules)
        resolve("state_dict_type", _state_dict_type, version, self.state_dict_type)
        for name in ("state_dict_config", "optim_state_dict_config"):
            given = getattr(self, name)
            with problems.caught():
                if given is not None and not hasattr(given, "offload_to_cpu"):
                    raise wrong_type(f"{_NAME}: {name}", given, "one of torch's, such as FullStateDictConfig()")
        for name in ("activation_checkpointing", "activation_checkpointing_offload", "cpu_ram_efficient_loading"):
            resolve(name, _flag, name, getattr(self, name))
        with problems.caught():
            if self.activation_checkpointing_offload and not self.activation_checkpointing:
                raise ConfigError(
                    "is True, but activation_checkpointing is not. Set both.",
                    f"{_NAME}: activation_checkpointing_offload",
                )
        with problems.caught():
            self._set_wrapping()
        problems.raise_all()

    def _check_version_1(self, problems: Problems) -> None:
        """Refuse what only version 1 has, say which of it changes nothing, and forget it."""
        asked: dict[str, tuple[Any, str]] = {"backward_prefetch": _asked("backward_prefetch", self.backward_prefetch)}
        with problems.caught():
            check_word(asked["backward_prefetch"][1], _prefetch(asked["backward_prefetch"][0]), _PREFETCHES)
        for name in ("forward_prefetch", "limit_all_gathers"):
            with problems.caught():
                value = None if getattr(self, name) == _IDLE[name] else getattr(self, name)
                asked[name] = _flag(name, value, default=_IDLE[name]), _asked(name, value)[1]
        for name in ("use_orig_params", "sync_module_states"):
            with problems.caught():
                if getattr(self, name) is not None:
                    check_flag(f"{_NAME}: {name}", getattr(self, name))
        with problems.caught():
            if self.param_init_fn is not None:
                raise Unsupported(
                    f"is {shown(self.param_init_fn)}, which FSDP2 does not call. Leave it out, and initialize the "
                    "model on a device before `prepare`.",
                    f"{_NAME}: param_init_fn",
                )
        for name, (value, called) in asked.items():
            hint = without_effect(name, value, called)
            if hint is not None and not environ.integer("RANK"):
                _log.warning(hint)
        self.sharding_strategy = self.backward_prefetch = self.forward_prefetch = None
        self.use_orig_params = self.sync_module_states = self.param_init_fn = None
        self.limit_all_gathers = True

    def _set_offload(self, asked: Any) -> None:
        if asked is None or isinstance(asked, (bool, int)):
            self.cpu_offload = _flag("cpu_offload", asked, "FSDP_OFFLOAD_PARAMS")
        elif hasattr(asked, "offload_params"):  # version 1's CPUOffload
            self.cpu_offload = bool(asked.offload_params)
        else:
            from torch.distributed.fsdp import OffloadPolicy

            if not isinstance(asked, OffloadPolicy):
                raise wrong_type(f"{_NAME}: cpu_offload", asked, "True, False, or torch's CPUOffloadPolicy()")

    def _set_wrapping(self) -> None:
        names, least = self.transformer_cls_names_to_wrap, self.min_num_params
        self.auto_wrap_policy = _wrap_policy(self.auto_wrap_policy)
        by_class, by_size = (self.auto_wrap_policy == word for word in WRAP_POLICIES[:2])
        for given, fits, name, word in (
            (names, by_class, "transformer_cls_names_to_wrap", WRAP_POLICIES[0]),
            (least, by_size, "min_num_params", WRAP_POLICIES[1]),
        ):
            if given not in (None, 0) and not fits:
                raise ConfigError(
                    f"is {shown(given)}, which is for auto_wrap_policy={word!r} alone, but auto_wrap_policy is "
                    f"{shown(self.auto_wrap_policy)}. Set that policy, or leave this out.",
                    f"{_NAME}: {name}",
                )
        self.transformer_cls_names_to_wrap = _class_names(names) if by_class else None
        self.min_num_params = _least_params(least) if by_size else 0

    @property
    def offload_policy(self) -> OffloadPolicy:
        """What `fully_shard` takes for `cpu_offload`."""
        from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

        asked = self.cpu_offload
        return asked if isinstance(asked, OffloadPolicy) else CPUOffloadPolicy() if asked else OffloadPolicy()

    def policy_for(self, model: nn.Module) -> Callable[..., bool] | None:
        """Return which modules of `model` are sharded by themselves, as a function of torch's kind; None: none."""
        from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

        if self.auto_wrap_policy == "size_based_wrap":
            return functools.partial(size_based_auto_wrap_policy, min_num_params=self.min_num_params)
        if self.auto_wrap_policy != "transformer_based_wrap":
            policy: Callable[..., bool] | None = self.auto_wrap_policy
            return policy
        wanted = self.transformer_cls_names_to_wrap
        if wanted is None:  # transformers' models say which modules not to split
            declared = [getattr(module, "_no_split_modules", None) or () for module in model.modules()]
            wanted = list(dict.fromkeys(name for names in declared for name in names))
        if not wanted:
            raise ConfigError(
                f"auto_wrap_policy is transformer_based_wrap, but {type(model).__name__} has no _no_split_modules. "
                "Name its layers' class in transformer_cls_names_to_wrap, or use size_based_wrap."
            )
        classes = {type(module) for module in model.modules() if type(module).__name__ in wanted}
        if not classes:
            raise ConfigError(
                f"No module of this {type(model).__name__} is of a class to wrap: {wanted}. It has modules of "
                f"{sorted({type(module).__name__ for module in model.modules()})}."
            )
        return functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=classes)

    def set_auto_wrap_policy(self, model: nn.Module) -> None:
        """Replace a policy that is a word by torch's function for `model`. `prepare` needs no such call."""
        self.auto_wrap_policy = self.policy_for(model)

    def set_mixed_precision(
        self, mixed_precision: str | dtype, buffer_autocast: bool = False, override: bool = False
    ) -> None:
        """Compute, reduce gradients and return outputs in one dtype, unless there is a policy already.

        Args:
            mixed_precision: `bf16`, `fp16`, `fp32`, `fp8` (torchao multiplies in it; the rest is in bf16), or a dtype.
            buffer_autocast: keep buffers in fp32, which FSDP2 does with all buffers: they stay as they are.
            override: replace a policy that is set.
        """
        if override or self.mixed_precision_policy is None:
            self.mixed_precision_policy = _policy(mixed_precision)

    def validate_mixed_precision_policy(self) -> None:
        """Raise ConfigError unless `mixed_precision_policy` is one of torch's."""
        from torch.distributed.fsdp import MixedPrecisionPolicy

        if not isinstance(self.mixed_precision_policy, MixedPrecisionPolicy):
            name = f"{_NAME}: mixed_precision_policy"
            raise wrong_type(name, self.mixed_precision_policy, "a torch.distributed.fsdp.MixedPrecisionPolicy")

    def set_cpu_offload(self) -> None:
        """Replace a `cpu_offload` that is a flag by torch's policy. `prepare` needs no such call."""
        self._set_offload(self.cpu_offload)
        self.cpu_offload = self.offload_policy

    validate_cpu_offload = set_cpu_offload

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """Choose what `save_state` writes: FULL_STATE_DICT, say, for the last one of a run. None changes nothing."""
        self.state_dict_type = _state_dict_type(2, state_dict_type or self.state_dict_type)


def enable_fsdp_ram_efficient_loading() -> None:
    """Make transformers leave out values on other ranks from here on, for `prepare` to hand out those of rank 0."""
    if environ.text("ACCELERATE_USE_FSDP") is None:
        environ.export({"ACCELERATE_USE_FSDP": "true"})
    environ.export({"FSDP_CPU_RAM_EFFICIENT_LOADING": "true"})


def disable_fsdp_ram_efficient_loading() -> None:
    """Make transformers load weights on every rank from here on."""
    environ.export({"FSDP_CPU_RAM_EFFICIENT_LOADING": "false"})


def _asked(name: str, value: Any, variable: str = "") -> tuple[Any, str]:
    """Return the setting and how a message calls it: the argument, or else the variable that stands for it."""
    if value is not None:
        return value, f"{_NAME}: {name}"
    variable = variable or f"FSDP_{name.upper()}"
    return environ.text(variable) or None, f"The environment variable {variable}"


def _flag(name: str, value: Any, variable: str = "", default: bool = False) -> bool:
    if value is None:
        return environ.flag(variable or f"FSDP_{name.upper()}", default)
    check_flag(f"{_NAME}: {name}", value)
    return bool(value)


def _version(given: Any) -> int:
    value, called = _asked("fsdp_version", given, "FSDP_VERSION")
    if value is None:
        return 2
    if isinstance(value, bool) or str(value) not in ("1", "2"):
        raise ConfigError(f"is {shown(value)}; it must be 2, or 1 to have its settings translated.", called)
    return int(value)


def _word(value: Any, numbered: tuple[str, ...] = ()) -> str:
    """Return a word in capitals: a text, the number of one, or the name of a member of torch's enumeration."""
    word = value.name if isinstance(value, Enum) else str(value)
    word = word.upper().removeprefix("_")
    return numbered[int(word) - 1] if word.isdecimal() and 0 < int(word) <= len(numbered) else word


def _reshards(version: int, strategy: Any, given: Any) -> bool | int:
    """Return what `fully_shard` takes for `reshard_after_forward`.

    Of the environment, version 1 reads the strategy first: Accelerate's launcher always sets both variables.
    """
    by_strategy = None if strategy is None else _strategy(strategy, f"{_NAME}: sharding_strategy")
    if given is not None:
        reshards = parse_reshard(version, given, f"{_NAME}: reshard_after_forward")
        if by_strategy not in (None, reshards):
            raise ConfigError(
                f"is {shown(strategy)}, but reshard_after_forward is {shown(given)}. Leave out sharding_strategy.",
                f"{_NAME}: sharding_strategy",
            )
        return reshards
    if by_strategy is not None:
        return by_strategy
    word, called = _asked("", None, "FSDP_SHARDING_STRATEGY")
    value, called_newer = _asked("", None, "FSDP_RESHARD_AFTER_FORWARD")
    if value is not None and (version == 2 or word is None):
        return parse_reshard(version, value, called_newer)
    return True if word is None else _strategy(word, called)


def _strategy(value: Any, called: str) -> bool:
    word = _word(value, _STRATEGIES)
    if word == "NO_SHARD":
        raise Unsupported(f"is {shown(value)}, which is not sharding. Leave out FSDP: DDP replicates models.", called)
    if word.startswith("HYBRID_SHARD"):
        reshards = word == "HYBRID_SHARD"
        raise Unsupported(
            f"is {shown(value)}, which FSDP2 has as a grid of ranks. Use reshard_after_forward={reshards} and "
            "ParallelismConfig(dp_replicate_size=..., dp_shard_size=...), whose product is the number of processes.",
            called,
        )
    check_word(called, word, _RESHARDS)
    return _RESHARDS[word]


def parse_reshard(version: int, value: Any, called: str) -> bool | int:
    """Return what `fully_shard` takes for a `reshard_after_forward` of version 1 or 2, named `called` in errors."""
    if isinstance(value, bool):
        return value
    is_number = isinstance(value, int) or (isinstance(value, str) and value.isdecimal())
    if isinstance(value, str) and (version == 2 or not is_number):
        word = value.strip().lower()
        if word in environ.TRUE_WORDS + environ.FALSE_WORDS:
            return word in environ.TRUE_WORDS
    if version == 2 and is_number:
        check_whole(f"{called} (a number of ranks)", int(value), least=2)
        return int(value)
    if isinstance(value, (str, int, Enum)):
        return _strategy(value, called)
    raise wrong_type(called, value, "True, False, or a number of ranks")


def without_effect(name: str, value: Any, called: str) -> str | None:
    """Return what to say of a setting of version 1 that asks for what FSDP2 does not do, and changes no result."""
    idle = value is None or (value == _IDLE[name] if name in _IDLE else _prefetch(value) != "BACKWARD_POST")
    return None if idle else f"{called} is {shown(value)}, which changes nothing: {_WHY_NOT[name]}."


def _prefetch(value: Any) -> str:
    return "NO_PREFETCH" if value is None else _word(value, _PREFETCHES)


def _policy(value: Any) -> MixedPrecisionPolicy:
    """Return torch's policy for a word, a dtype, a dictionary, or a policy of version 1 or 2."""
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy

    called = f"{_NAME}: mixed_precision_policy"
    if isinstance(value, MixedPrecisionPolicy):
        return value
    if isinstance(value, (str, torch.dtype)):
        known: dict[Any, torch.dtype] = {word: getattr(torch, name) for word, name in _PRECISIONS.items()}
        known |= {kind: kind for kind in known.values()}
        if value not in known:
            raise ConfigError(f"is {shown(value)}; use one of {', '.join(_PRECISIONS)}, or their dtypes.", called)
        return MixedPrecisionPolicy(param_dtype=known[value], reduce_dtype=known[value], output_dtype=known[value])
    if hasattr(value, "buffer_dtype"):  # version 1's MixedPrecision
        value = {name: getattr(value, name) for name in ("param_dtype", "reduce_dtype", "buffer_dtype")}
    if not isinstance(value, Mapping):
        raise wrong_type(called, value, "a MixedPrecisionPolicy, a dictionary of dtypes, or a word such as 'bf16'")
    if value.get("buffer_dtype") not in (None, torch.float32):
        raise Unsupported(
            f"{called}: buffer_dtype is {value['buffer_dtype']}, but FSDP2 leaves buffers as they are. Leave it out, "
            "and convert the model's buffers yourself."
        )
    dtypes = {name: kind for name, kind in value.items() if name != "buffer_dtype"}
    for name, kind in dtypes.items():
        check_word(f"{called}: a key", name, (*_DTYPES, "cast_forward_inputs"))
        if name in _DTYPES and kind is not None and not isinstance(kind, torch.dtype):
            raise wrong_type(f"{called}: {name}", kind, "a dtype, such as torch.bfloat16")
    return MixedPrecisionPolicy(**dtypes)


def _ignored(given: Any) -> list[Any] | str | None:
    value, called = _asked("ignored_modules", given)
    if value is None:
        return None
    if isinstance(value, str):
        try:
            re.compile(value)
        except re.error as error:
            raise ConfigError(f"is {value!r}, which is no regular expression: {error}.", called) from None
        return value
    modules = list(value) if isinstance(value, Iterable) else [None]
    if not all(hasattr(module, "named_parameters") for module in modules):
        raise wrong_type(called, value, "a list of modules, or a regular expression of their names")
    return modules


def _state_dict_type(version: int, given: Any) -> str:
    value, called = _asked("state_dict_type", given)
    if value is None:
        return "SHARDED_STATE_DICT" if version == 2 else "FULL_STATE_DICT"
    word = _word(value, _NUMBERED_STATES)
    if word == "LOCAL_STATE_DICT":
        raise Unsupported(f"is {shown(value)}, which FSDP2 does not have. Use SHARDED_STATE_DICT.", called)
    check_word(called, word, STATE_DICT_TYPES)
    return word


def _wrap_policy(given: Any) -> Any:
    value, called = _asked("auto_wrap_policy", given)
    if callable(value):
        return _TORCH_POLICIES.get(getattr(value, "__name__", ""), value)
    if value is None:
        return None
    word = value.lower() if isinstance(value, str) else value
    check_word(called, word, WRAP_POLICIES)
    return None if word == "no_wrap" else word


def _class_names(given: Any) -> list[str] | None:
    value, called = _asked("transformer_cls_names_to_wrap", given, "FSDP_TRANSFORMER_CLS_TO_WRAP")
    if value is None:
        return None
    names = value.split(",") if isinstance(value, str) else list(value) if isinstance(value, Iterable) else []
    names = [name.strip() if isinstance(name, str) else "" for name in names]
    if not names or not all(names):
        raise wrong_type(called, value, "a list of class names, such as ['LlamaDecoderLayer']")
    return names


def _least_params(given: Any) -> int:
    if given is None:
        given = environ.integer("FSDP_MIN_NUM_PARAMS")
    if given is None:
        return MIN_NUM_PARAMS
    check_whole(f"{_NAME}: min_num_params", given, least=0)
    return int(given) or MIN_NUM_PARAMS  # Accelerate's plugin and config files have 0 by default
