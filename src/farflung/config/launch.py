# SPDX-License-Identifier: Apache-2.0
"""The launch settings: ONE list, from which flags, YAML keys, environment variables, questions and help are made."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any, get_args, get_type_hints

from farflung.base.checks import check_number, check_path, check_place, check_whole
from farflung.base.enums import DynamoBackend
from farflung.base.errors import ConfigError
from farflung.base.words import counted
from farflung.config import environ
from farflung.config.engines import EngineSettings
from farflung.config.grid import GRID, LayoutSettings, check_layout
from farflung.config.groups import group_of
from farflung.config.outer import NAMES, OPTIONS, Outer, OuterSettings, outer_config
from farflung.config.problems import renamed
from farflung.config.recipes import RECIPES
from farflung.config.setting import Field, Value, accelerates, setting

DEFAULT_PORT = 29500  # torchrun's and Accelerate's
_PREFIX = "FARFLUNG_"
_HOST_PART = re.compile(r"(?!-)[\w-]{1,63}(?<!-)")
# The keys of `rdzv_conf` that torch's rendezvous reads; it ignores others without a word. Times are in seconds.
_RENDEZVOUS_NUMBERS = (
    *("timeout", "read_timeout", "join_timeout", "last_call_timeout", "close_timeout", "heartbeat_timeout"),
    *("keep_alive_interval", "keep_alive_max_attempt"),
)
_RENDEZVOUS_KEYS = (*_RENDEZVOUS_NUMBERS, "is_host", "store_type")
_REPEATED = {"rdzv_backend": "rdzv_backend", "rdzv_endpoint": "main_process_port", "rdzv_id": ""}  # which it ignores
_FROM_1 = (
    *("num_processes", "num_machines", "gradient_accumulation_steps", "num_cpu_threads_per_process", "replicas"),
    *("ranks_per_replica", *(f"{GRID}{axis}_size" for axis in ("dp_replicate", "dp_shard", "tp", "cp", "sp"))),
)
_FROM_0 = ("machine_rank", "max_restarts", "main_process_port")
_LEAST = dict.fromkeys(_FROM_0, 0) | dict.fromkeys(_FROM_1, 1) | {"state_every": 2}
_GPU = re.compile(r"\d+|(GPU|MIG)-[\w/-]+")  # what CUDA_VISIBLE_DEVICES takes


def _several_machines(answers: Mapping[str, Value]) -> bool:
    return int(answers["num_machines"] or 1) > 1


def _how_many(answers: Mapping[str, Value]) -> str:
    together, each = (", on all machines together", " on each machine") if _several_machines(answers) else ("", "")
    return f"How many processes{together} (empty: one{each if answers['use_cpu'] else ' per accelerator'})?"


@dataclass(frozen=True)
class LaunchSettings(LayoutSettings, EngineSettings):
    """How a script is started. An object of this class is a set of settings that can work together.

    Raises:
        ConfigError: two settings contradict each other, or a number is out of its range.
    """

    use_cpu: bool = accelerates(
        False,
        "Train on the CPU, even if accelerators are available.",
        flags=("--cpu", "--use_cpu"),
        question="Train on the CPU, even if there is an accelerator?",
    )
    num_machines: int = setting(1, "Number of machines.", question="How many machines?")
    machine_rank: int = setting(
        0,
        "Rank of this machine, counted from 0.",
        question="What is the rank of this machine (0 for the main machine)?",
        asked_when=_several_machines,
    )
    main_process_ip: str | None = setting(
        None,
        "Host name or IP address of machine 0. Required with several machines.",
        question="Host name or IP address of the main machine?",
        asked_when=_several_machines,
    )
    main_process_port: int | None = setting(
        None,
        "Port of the rendezvous on machine 0. [any free port; 29500 with several machines]",
        question="Port on the main machine?",
        asked_when=_several_machines,
    )
    network_interface: str | None = setting(
        None, "Network interface to the other machines, such as eth0. [that of the route to main_process_ip]"
    )
    num_processes: int | None = setting(
        None,
        "Number of processes, on all machines; on CPUs at most 16 per core. [one per accelerator; one on the CPU]",
        question=_how_many,
    )
    multi_gpu: bool = setting(False, "Require GPUs: refuse to start without them.", in_file=False)
    gpu_ids: str = setting(
        "all",
        "GPUs to use on this machine: `all`, or numbers separated by commas.",
        question="Which GPUs (all, or numbers separated by commas)?",
        asked_when=lambda answers: not answers["use_cpu"],
    )
    mixed_precision: str = accelerates(
        "no",
        "Compute in this type where it is safe.",
        choices=("no", "fp16", "bf16", "fp8"),
        question="Mixed precision?",
    )
    gradient_accumulation_steps: int | None = accelerates(
        None, "Micro-batches per optimizer step. [the script's value]"
    )
    gradient_clipping: float | None = accelerates(
        None, "Maximum gradient norm, for scripts that read it. [the script's value]"
    )
    dynamo_backend: str = accelerates(
        "no",
        "Compile models in `prepare` with this torch.compile backend, such as inductor.",
        choices=tuple(str(word).lower() for word in DynamoBackend),
    )
    dynamo_mode: str | None = accelerates(
        None,
        "torch.compile's mode. [the script's value]",
        choices=("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
    )
    dynamo_use_fullgraph: bool | None = accelerates(None, "Treat graph breaks as errors. [the script's value]")
    dynamo_use_dynamic: bool | None = accelerates(
        None, "Compile for dynamic shapes. [the script's value, or else once a shape has changed]"
    )
    dynamo_use_regional_compilation: bool | None = accelerates(
        None, "Compile repeated blocks separately, and identical blocks only once. [the script's value]"
    )
    num_cpu_threads_per_process: int | None = setting(
        None,
        "CPU threads per process. [cores / processes that the launcher starts here; torch's default for one]",
        variable="OMP_NUM_THREADS",
    )
    hang_timeout_s: float = setting(
        600.0,
        "Seconds that ranks wait in a collective for a rank that does not arrive, or whose machine does not answer, "
        "before they fail and name it. WatchdogKwargs in the script take precedence. 0: no time-out.",
        told=True,
    )
    outer_recipe: str | None = setting(
        None,
        "Train replicas that synchronize every H steps by this recipe: auto (measures and "
        f"chooses), {', '.join(RECIPES)}. The other --outer flags set its options. [the script's]",
        told=True,
        flags=("--outer_recipe", "--outer"),
        choices=NAMES,
    )
    elastic: str | None = setting(
        None, "Start replicas that may be lost, leave and join at any time: at least and at most how many, such as 2:8."
    )
    replicas: int | None = setting(None, "Replicas to start on this machine, with --elastic or --join. [the least; 1]")
    ranks_per_replica: int = setting(1, "Processes that train one replica together, with --elastic or --join.")
    grace_s: float | None = setting(
        None,
        "Seconds to wait for a late replica, with --elastic. [30, in a bucket 60, at hf:// 120; two rounds if longer]",
    )
    join: str | None = setting(
        None, "Start replicas that join a run: host:port, as its first launcher has printed it.", in_file=False
    )
    meet: str | None = setting(
        None,
        "With --elastic, where replicas meet: file:///path, a folder that all machines can write to; s3://bucket/path, "
        "gs://, az:// or hf://, a bucket; tcp://host:port, a port of the machine that begins. Each machine gets the "
        "same line, in any order. [the first launcher serves the run]",
    )
    heartbeat_s: float | None = setting(
        None, "Heartbeat interval of a launcher in seconds, with --meet. [1 in a folder, 10 in a bucket, 20 at hf://]"
    )
    state_every: int | None = setting(
        None,
        "With --meet, rounds lost at most if all replicas die: the address gets their state twice as often. [10; "
        "more if states take long]",
    )
    key_file: str | None = setting(None, "File with the run's key, with --elastic or --join. [the key in FARFLUNG_KEY]")
    outer_options: Mapping[str, Value] = field(default_factory=dict)  # by name: `outer_*` in every other form
    debug: bool = setting(
        False,
        "Check that all ranks call matching collectives, and show the launcher's log.",
        variable="ACCELERATE_DEBUG_MODE",
        question="Check during training that all ranks call matching collectives (slower)?",
    )
    module: bool = setting(False, "Run a module, like `python -m`.", flags=("-m", "--module"), in_file=False)
    as_accelerate: bool = setting(False, "Answer `import accelerate` with Farflung, also in libraries.")
    no_python: bool = setting(False, "Run the script directly, without Python.", in_file=False)
    max_restarts: int | None = setting(
        None,
        "How many times all processes are restarted after a failure. [0; with --elastic 3 for each replica and hour]",
    )
    save_on_signal: str | None = setting(
        None,
        "At SIGTERM or SIGUSR1, at any rank or launcher, stop all ranks after the same step and save to this folder, "
        "which all machines share, or address; exit code 75. accelerator.resume() continues. [ranks end at once]",
        told=True,
    )
    monitor_interval: float = setting(0.1, "Seconds between two checks of the processes.")
    rdzv_backend: str = setting(
        "static",
        "Rendezvous backend: how the machines find each other.",
        choices=("static", "c10d"),
        question="Rendezvous backend: how do the machines find each other?",
        asked_when=_several_machines,
    )
    rdzv_conf: str = setting("", "More options of the rendezvous: key=value,key=value.")
    same_network: bool = setting(False, "Accelerate's. It changes nothing: all machines connect to main_process_ip.")
    run_dir: str | None = setting(
        None,
        "Folder for this run's settings, logs, rounds, metrics and events, which `farflung watch` and `report` show; "
        "none: make none. [farflung-runs/<time>-<script>]",
    )
    log_dir: str | None = setting(None, "Keep logs and error files in this folder. [with --tee the run's: logs/]")
    tee: str = setting(
        "0",
        "Also copy streams to files in log_dir: 1 stdout, 2 stderr, 3 both; `0:3,1:2` sets it per local rank.",
        flags=("-t", "--tee"),
    )
    role: str = setting("default", "Name of the processes in tee'd lines.")
    quiet: bool = setting(False, "Print nothing but errors.", flags=("-q", "--quiet"))
    main_training_function: str = setting("main", "Accelerate's, for TPUs; only `main` works.", choices=("main",))
    only_rank: str | None = setting(
        None, "Show only what these ranks print: numbers separated by commas, such as 0 or 0,3. [all]"
    )
    json: bool = setting(
        False, "Print the launcher's own messages as one JSON object a line: started, failed, restarted, ended ..."
    )
    config_file: str | None = setting(None, "Read the settings from this file; none: from no file.", in_file=False)
    dry_run: bool = setting(
        False, "Start nothing; print command, ranks, environment, and where each setting comes from.", in_file=False
    )

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> LaunchSettings:
        """Return the settings that `values` states by the names of `FIELDS`."""
        names = {attribute.name for attribute in fields(cls)}
        options = {_option(n): value for n, value in values.items() if n not in names and value is not None}
        return cls(**{name: values[name] for name in values if name in names}, outer_options=options)

    def value(self, name: str) -> Value:
        """Return the setting called `name` in `FIELDS`."""
        value: Value = getattr(self, name) if hasattr(self, name) else self.outer_options.get(_option(name))
        return value

    @property
    def outer(self) -> OuterSettings | None:
        """The outer loop that is asked for, None if none is."""
        return outer_config({"recipe": self.outer_recipe, **self.outer_options}, "--outer", OuterSettings)

    @property
    def gpu_list(self) -> tuple[str, ...]:
        """The GPUs named in `gpu_ids`; empty for all of them."""
        return () if self.gpu_ids == "all" else tuple(part.strip() for part in self.gpu_ids.split(","))

    @property
    def shown_ranks(self) -> tuple[int, ...]:
        """The ranks named in `only_rank`; empty for all of them."""
        return tuple(int(rank) for rank in self.only_rank.split(",")) if self.only_rank else ()

    @property
    def num_local(self) -> int | None:
        """Processes on this machine, or None when that is left to the number of accelerators."""
        return None if self.num_processes is None else self.num_processes // self.num_machines

    def __post_init__(self) -> None:
        self._check_ranges()
        _ = self.outer
        self._check_machines()
        self._check_devices()
        check_layout(self, self.num_processes, self.num_machines, self.outer_recipe)
        if self.module and self.no_python:
            raise ConfigError("--module and --no_python exclude each other: a module needs Python to run it.")
        if not re.fullmatch(r"[0-3]|\d+:[0-3](,\d+:[0-3])*", self.tee):
            raise ConfigError(f"is {self.tee!r}; use a number from 0 to 3, or a list such as 0:3,1:2.", "tee")
        if self.only_rank is not None and not re.fullmatch(r"\d+(,\d+)*", self.only_rank):
            raise ConfigError(f"is {self.only_rank!r}; use ranks separated by commas, such as 0 or 0,3.", "only_rank")
        if self.only_rank is not None and self.rdzv_backend == "c10d" and self.num_machines > 1:
            raise ConfigError("needs --rdzv_backend static: c10d numbers the machines when they meet.", "only_rank")
        for name in filter(self.value, ("run_dir", "log_dir", "save_on_signal", "key_file")):
            check = check_place if name == "save_on_signal" else check_path
            object.__setattr__(self, name, str(check(name, self.value(name))))
        self._check_rendezvous()
        self._check_elastic()
        self.check_engine(join=self.join, log_dir=self.log_dir, only_rank=self.only_rank)

    @property
    def rendezvous(self) -> dict[str, str]:
        """The options in `rdzv_conf`, by key."""
        parts = (part.partition("=") for part in self.rdzv_conf.split(",") if part)
        return {key.strip(): value.strip() for key, _, value in parts}

    def _check_rendezvous(self) -> None:
        for key, value in self.rendezvous.items():
            name, text = _REPEATED.get(key), value
            if key == "rdzv_endpoint":  # of a machine that may have several names
                text = "".join(re.findall(r"^[^:]+:(\d+)$", value))
            now = self.value(name) if name and text else None
            if now not in (None, "static") and str(now) != text:
                raise ConfigError(f"has {key}={value}, but {name} is {now}. Omit {key}.", "rdzv_conf")
            if key not in (*_RENDEZVOUS_KEYS, *_REPEATED):
                raise ConfigError(f"has the key {key!r}; use one of {', '.join(_RENDEZVOUS_KEYS)}.", "rdzv_conf")
            if key in _RENDEZVOUS_NUMBERS and not value.isdecimal():
                raise ConfigError(f"has {key}={value}; use key=value with a whole number, {key}=60.", "rdzv_conf")

    @property
    def bounds(self) -> tuple[int, int]:
        """At least and at most how many replicas there are."""
        least, _, most = (self.elastic or "1:64").partition(":")
        return int(least), int(most)

    def _check_elastic(self) -> None:
        if self.meet is not None and (self.elastic is None or self.join is not None):
            raise ConfigError("needs --elastic and excludes --join: each machine gets the same line.", "meet")
        if self.meet is not None and not re.fullmatch(r"file:///.+|(s3|gs|az|hf)://.+|tcp://.+:\d+", self.meet):
            raise ConfigError(
                f"is {self.meet!r}; use file:///shared/run7 with the whole path of a folder, s3://bucket/run7 (or "
                "gs://, az://, hf://namespace/bucket/run7), or tcp://host:port.",
                "meet",
            )
        if self.meet is not None and (self.main_process_ip or self.main_process_port):
            raise ConfigError("excludes main_process_ip and main_process_port: it says where replicas meet.", "meet")
        meet = self.meet or (self.engine == "slurm" and self.elastic and "file:") or ""  # in the run's folder
        kept = ("state_every", "--meet in a folder or a bucket", meet and not meet.startswith("tcp:"))
        for name, flag, has in (kept, ("heartbeat_s", "--meet", meet), ("grace_s", "--elastic", self.elastic)):
            if (value := getattr(self, name)) is not None and not has:
                raise ConfigError(f"is {value:g}, which needs {flag}.", name)
        if self.elastic is None and self.join is None:
            for name, default in (("replicas", None), ("ranks_per_replica", 1), ("key_file", None)):
                if getattr(self, name) != default:
                    raise ConfigError(f"is {getattr(self, name)}, but there is neither --elastic nor --join.", name)
            return
        flag = "--elastic" if self.join is None else "--join"
        if self.only_rank is not None:
            instead = "Print on one of them: accelerator.print, or `if loop.is_first`."
            raise ConfigError(f"and {flag} are both given, but replicas have no fixed ranks. {instead}", "only_rank")
        if self.save_on_signal is not None:
            instead = "Replicas sign out on SIGTERM and SIGUSR1; the others, or the address of --meet, keep the state."
            raise ConfigError(f"and {flag} are both given. {instead}", "save_on_signal")
        if self.elastic is not None and self.join is not None:
            raise ConfigError("Both --elastic and --join are given: the run that is joined has its bounds already.")
        if self.elastic is not None and not re.fullmatch(r"[1-9]\d{0,3}:[1-9]\d{0,3}", self.elastic):
            raise ConfigError(f"is {self.elastic!r}; use the least and the most replicas, such as 2:8.", "elastic")
        if (least := self.bounds[0]) > (most := self.bounds[1]):
            raise ConfigError(f"is {self.elastic!r}: the least, {least}, is more than the most, {most}.", "elastic")
        if self.elastic is not None and self.replicas is not None and self.replicas > most:
            raise ConfigError(f"is {self.replicas}, but elastic is {self.elastic}: at most {most}.", "replicas")
        host, _, port = (self.join or "host:1").rpartition(":")
        if not port.isdecimal() or not 0 < int(port) < 65536 or not _is_host(host.strip("[]")):
            raise ConfigError(f"is {self.join!r}; use host:port, as the first launcher has printed it.", "join")
        for name in ("num_processes", "island_size"):
            if getattr(self, name) is not None:
                raise ConfigError(f"and {flag} are both given. Use --ranks_per_replica instead.", name)
        if self.num_machines > 1:
            raise ConfigError(f"and {flag} are both given. On other machines, use --join host:port.", "num_machines")

    def _check_ranges(self) -> None:
        for name, least in _LEAST.items():
            if (value := getattr(self, name)) is not None:
                check_whole(name, value, least, 65535 if name == "main_process_port" else None)
        check_number("hang_timeout_s", self.hang_timeout_s, least=0)
        for name in ("gradient_clipping", "monitor_interval", "grace_s", "heartbeat_s"):
            if (value := getattr(self, name)) is not None:
                check_number(name, value, above=0)

    def _check_machines(self) -> None:
        if self.machine_rank >= self.num_machines:
            allowed = f"below {self.num_machines}" if self.num_machines > 1 else "0"
            raise ConfigError(
                f"is {self.machine_rank} but num_machines is {self.num_machines}; it must be {allowed}.", "machine_rank"
            )
        if self.num_machines == 1:
            return
        if not self.main_process_ip and self.is_local:  # engines know where they start what
            raise ConfigError(
                f"is {self.num_machines}, but main_process_ip is not set. Set it to machine 0's name or address.",
                "num_machines",
            )
        if self.main_process_ip and not _is_host(self.main_process_ip):
            raise ConfigError(
                f"is {self.main_process_ip!r}; use a host name or an address alone. The port is main_process_port.",
                "main_process_ip",
            )
        if self.main_process_port == 0:
            raise ConfigError("is 0 (any free port), but several machines must agree on one.", "main_process_port")
        if self.num_processes is not None and self.num_processes % self.num_machines:
            raise ConfigError(
                f"({self.num_processes}) counts the processes of all machines, "
                f"and must be a multiple of num_machines ({self.num_machines}).",
                "num_processes",
            )

    def _check_devices(self) -> None:
        if self.use_cpu and self.multi_gpu:
            raise ConfigError("Both the CPU (--cpu) and GPUs (--multi_gpu) are asked for; choose one.")
        gpus = self.gpu_list
        if gpus and self.use_cpu:
            raise ConfigError(f"Both the CPU (--cpu) and GPUs (gpu_ids is {self.gpu_ids!r}) are asked for; choose one.")
        if len(set(gpus)) < len(gpus) or not all(_GPU.fullmatch(gpu) for gpu in gpus):
            raise ConfigError(f"is {self.gpu_ids!r}; use `all`, or distinct numbers separated by commas.", "gpu_ids")
        if gpus and self.num_local is not None and self.num_local > len(gpus):
            raise ConfigError(
                f"names {counted(len(gpus), 'GPU')} ({self.gpu_ids}) for {self.num_local} processes on this "
                "machine; each process needs one of its own.",
                "gpu_ids",
            )


def _is_host(text: str) -> bool:
    """Return whether a text can be a host name or an IP address. Nothing is looked up."""
    try:
        ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return len(text) <= 253 and all(map(_HOST_PART.fullmatch, text.removesuffix(".").split(".")))
    return True


def _listed() -> Iterator[Field]:
    hints = get_type_hints(LaunchSettings)
    inherited = {*LayoutSettings.__dataclass_fields__, *EngineSettings.__dataclass_fields__}
    for attribute in sorted(fields(LaunchSettings), key=lambda attribute: attribute.name in inherited):
        if attribute.name == "outer_options":
            for option in OPTIONS.values():
                name, variable = f"outer_{option.name}", f"{_PREFIX}OUTER_{option.name.upper()}"
                row = (option.kind, None, option.help, variable, variable, (f"--{name}",))
                yield Field(name, group_of(name), *row, choices=option.choices)
            continue
        stated = dict(attribute.metadata)
        told = stated.pop("told", "variable" in stated)
        name, hint = attribute.name, hints[attribute.name]
        prefix = stated.pop("prefix", "" if name.startswith(("fsdp_", GRID)) else _PREFIX)
        rest: dict[str, Any] = {"variable": f"{prefix}{name}".upper(), "flags": (f"--{name}",)} | stated
        kind = next((part for part in get_args(hint) if part is not type(None)), hint)
        says_word = kind is bool and name.startswith("fsdp_")
        yield Field(name, group_of(name), kind, told_as=rest["variable"] if told else None, says_word=says_word, **rest)


def _option(name: str) -> str:
    return name.removeprefix("outer_")


FIELDS: tuple[Field, ...] = tuple(_listed())


def field_named(name: str) -> Field:
    """Return the setting called `name`."""
    return next(entry for entry in FIELDS if entry.name == name)


def flags_for(settings: LaunchSettings, without: Collection[str] = ()) -> list[str]:
    """Return the words of a command line that ask for what `settings` have other than by default, or by a variable."""
    words: list[str] = []
    for entry in FIELDS:
        value = settings.value(entry.name)
        is_silent = entry.is_switch and not entry.in_file and not value  # it has no negative form
        is_default = value == entry.default and (is_silent or entry.from_environment() in (None, value))
        if value is None or is_default or entry.name in without:
            continue
        flag = min(entry.flags, key=len)
        flag = flag.replace("_", "-") if entry.name.startswith("outer_") else flag
        if not entry.is_switch:
            words += [flag, entry.text(value)]
        else:
            words.append(flag if value else f"--no_{entry.flags[-1].lstrip('-')}")
    return words


def check_variables() -> None:
    """Raise ConfigError for variables with our prefix that no setting reads, such as misspelled ones, or can't read."""
    known = {entry.variable: entry for entry in FIELDS}
    by_word = {word.strip("-").upper(): entry.variable for entry in FIELDS for word in (entry.name, *entry.flags)}
    for name in sorted(environ.named(_PREFIX)):
        if name in known:
            known[name].from_environment()
        elif name not in (environ.KEY, *environ.MEMBER_VARIABLES, *environ.OF_LAUNCHERS):
            meant = get_close_matches(name.removeprefix(_PREFIX), by_word, n=1)
            near = f" Did you mean `{by_word[meant[0]]}`?" if meant else ""
            raise ConfigError(f"The environment variable {name} is not a setting.{near} Unset or correct it.")


def launched_outer(make: Callable[..., Outer] = OuterSettings) -> Outer | None:  # type: ignore[assignment]
    """Return the outer loop that the environment variables ask for, which `make` makes, or None."""
    check_variables()
    entries = {_option(entry.name): entry for entry in FIELDS if entry.name.startswith("outer_")}
    arguments = {option: entry.from_environment() for option, entry in entries.items()}
    try:
        return outer_config(arguments, "FARFLUNG_OUTER_RECIPE", make)
    except ConfigError as error:
        raise renamed(error, {option: entry.variable for option, entry in entries.items()}) from None


def rank_variables(settings: LaunchSettings) -> dict[str, str]:
    """Return the environment variables that tell the ranks what was set; what was left open is left out."""
    values = ((entry, settings.value(entry.name)) for entry in FIELDS)
    variables = {entry.told_as: entry.text(value) for entry, value in values if entry.told_as and value is not None}
    if settings.use_fsdp:
        variables.setdefault("FSDP_VERSION", "2")  # Accelerate, in a script of its, would take version 1
    if settings.quiet:
        variables[environ.QUIET] = "true"
    if settings.gpu_list:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(settings.gpu_list)
    return variables
