# SPDX-License-Identifier: Apache-2.0
"""Configuration files: what one says and in which line, and how one is written. `places` says which one counts.

Every value is read as its setting wants it, not as YAML guesses it: of `no`, a precision is a word, a flag a no.
Accelerate's file is read as it stands and never written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from yaml.events import AliasEvent, CollectionEndEvent, CollectionStartEvent
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from farflung.base.checks import check_path
from farflung.base.errors import ConfigError, Unsupported, did_you_mean
from farflung.base.files import atomic_file
from farflung.config.foreign import DISTRIBUTED_TYPES, FOREIGN_KEYS
from farflung.config.launch import FIELDS, LaunchSettings
from farflung.config.places import accelerate_files
from farflung.config.problems import Problems
from farflung.config.setting import Stated

_FIELDS = {entry.name: entry for entry in FIELDS if entry.in_file}
_KNOWN = (*_FIELDS, *FOREIGN_KEYS, "distributed_type", "fp16")  # the last one is of Accelerate before 0.7
# Their keys are settings too, with or without this prefix: Accelerate's, and ours.
BLOCKS = {
    "dynamo_config": "dynamo_",
    "fsdp_config": "fsdp_",
    "parallelism_config": "parallelism_config_",
    "outer": "outer_",
}
_FORMER_KEYS = {"fsdp_backward_prefetch_policy": "fsdp_backward_prefetch"}  # of Accelerate's older files
_YAML_NULLS = ("", "~", "null", "Null", "NULL")
_DEEPEST = 20  # blocks in blocks; settings stand in two, and what Accelerate writes in three


def read_file(path: Path) -> tuple[dict[str, Stated], tuple[str, ...]]:
    """Return the settings that the file states, by name, and what to tell the user about other keys of it.

    Raises ConfigError, with file and line, for what is no YAML mapping, an unknown or repeated key, or a value that its
    setting can't take; Unsupported for what Farflung does not do. Several of them are one error.
    """
    entries = dict(_entries(path))
    stated: dict[str, Stated] = {}
    notes, problems = [], Problems()
    with problems.caught():
        _read_foreign("compute_environment", entries)
    problems.raise_all()  # on another environment all other keys mean something else
    for key, (node, place) in entries.items():
        with problems.caught():
            if key in _FIELDS:
                text = _scalar(key, node, place)
                if text is not None:
                    stated[key] = Stated(_FIELDS[key].parse(text, f"{place}: {key}"), "file", place)
            elif key in FOREIGN_KEYS:
                notes.append(_read_foreign(key, entries))
            elif key in BLOCKS:
                raise ConfigError(f"{place}: {key} must be a mapping, not a single value.")
            elif key not in _KNOWN and (not _is_idle(node, ("false",)) or did_you_mean(key, _KNOWN)):
                raise ConfigError(f"{place}: unknown key `{key}`.{did_you_mean(key, _KNOWN)}")
    with problems.caught():
        if "distributed_type" in entries:
            _read_distributed_type(*entries["distributed_type"], stated)
    problems.raise_all()
    if "fp16" in entries and not _is_idle(entries["fp16"][0], ("false", "no")):
        stated.setdefault("mixed_precision", Stated("fp16", "file", entries["fp16"][1]))
    sizes = [setting for name, setting in stated.items() if name.startswith(BLOCKS["parallelism_config"])]
    if sizes:  # the block alone asks for it, in Accelerate's files
        stated.setdefault("use_parallelism_config", Stated(True, "file", sizes[0].place))
    return stated, tuple(note for note in notes if note)


def _read_foreign(key: str, entries: Mapping[str, tuple[Node, str]]) -> str | None:
    """Return what to say of a key of something that Farflung does not do; raise Unsupported if it asks for that."""
    foreign = FOREIGN_KEYS[key]
    if key not in entries or _is_idle(entries[key][0], ("", "false", *foreign.idle.split())):
        return None
    place = entries[key][1]
    if foreign.is_hint:
        return f"{place}: `{key}` asks for {foreign.what}, which Farflung does not do. Results are the same without it."
    if foreign.read_with:
        reader, words = str(foreign.read_with[0]), foreign.read_with[1:]
        value = _scalar(reader, *entries[reader]) if reader in entries else None
        if (None if value is None else value.lower()) not in words:
            why = f"{reader} is {value}" if value else f"there is no {reader}"
            return f"{place}: `{key}` is not read, as {why}."
    what = f"asks for {foreign.what}, which Farflung does not support"
    raise Unsupported(f"{place}: `{key}` {what}. {foreign.instead}")


def read_mapping(path: Path) -> MappingNode | None:
    """Return what a file of YAML holds, without aliases, tags and deep nesting; None if it is empty.

    Raises ConfigError, with file and line, for everything else.
    """
    try:
        text = path.read_text(encoding="utf-8")
        _check_events(path, text)
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{path}:{line}: this is not YAML: {error.problem}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: this is not YAML: {error}.") from None
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}. Name another file with --config_file.") from None
    if root is not None and not isinstance(root, MappingNode):
        raise ConfigError(f"{path}:1: the file must be a mapping of `key: value` lines.")
    return root


def _entries(path: Path) -> Iterator[tuple[str, tuple[Node, str]]]:
    """Yield each key of the file with its value's node and its place; those of a block by their settings' names."""
    root = read_mapping(path)
    if root is None:
        return
    seen: dict[str, tuple[int, Node]] = {}
    for word, line, value in _lines(root):
        first, other = seen.setdefault(word, (line, value))
        if not _are_equal(value, other):
            raise ConfigError(
                f"{path}:{line}: `{word}` appears twice with different values, first in line {first}. Keep one."
            )
        if value is other:
            yield word, (value, f"{path}:{line}")


def _check_events(path: Path, text: str) -> None:
    """Refuse tags and aliases, which no setting needs, and nesting that the composer's recursion could not follow.

    Aliases of aliases make a file of some lines a tree of any size, and one of a node around it a circle.
    """
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        place = f"{path}:{event.start_mark.line + 1 if event.start_mark else 1}"
        tag = getattr(event, "tag", None)
        if tag is not None:
            written = tag.replace("tag:yaml.org,2002:", "!!")
            raise ConfigError(f"{place}: `{written}` is a YAML tag, which is not supported. Write the plain value.")
        if isinstance(event, AliasEvent):
            raise ConfigError(
                f"{place}: `*{event.anchor}` is a YAML alias, which is not supported. Write the value again."
            )
        depth += isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)
        if depth > _DEEPEST:
            raise ConfigError(
                f"{place}: mappings or lists are nested more than {_DEEPEST} deep; settings need at most two levels."
            )


def _lines(block: MappingNode, prefix: str = "") -> Iterator[tuple[str, int, Node]]:
    """Yield the keys of a block, with or without `prefix`, and of the blocks in it, with line and value."""
    for key, value in block.value:
        word = str(key.value)
        if word in BLOCKS and isinstance(value, MappingNode):
            yield from _lines(value, BLOCKS[word])
        elif not (word in BLOCKS and _says_nothing(value)):
            name = word if word.startswith(prefix) else prefix + word
            yield _FORMER_KEYS.get(name, name), key.start_mark.line + 1, value


def _scalar(key: str, node: Node, place: str) -> str | None:
    """Return the text of a plain value, None when it is null."""
    if not isinstance(node, ScalarNode):
        raise ConfigError(f"{place}: {key} must be a plain value, not a list or a mapping.")
    return None if _says_nothing(node) else str(node.value)


def _says_nothing(node: Node) -> bool:
    return isinstance(node, ScalarNode) and node.style is None and node.value in _YAML_NULLS


def _are_equal(one: Any, other: Any) -> bool:
    """Whether two nodes of YAML say the same."""
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_are_equal, one, other))
    return type(one) is type(other) and (one == other or (isinstance(one, Node) and _are_equal(one.value, other.value)))


def _is_idle(node: Node, words: tuple[str, ...]) -> bool:
    """Whether all that `node` holds is null or one of `words`, as in a block whose questions were answered with no."""
    if isinstance(node, MappingNode):
        return all(_is_idle(value, words) for _, value in node.value)
    if isinstance(node, SequenceNode):
        return not node.value
    return _says_nothing(node) or node.value.lower() in words


def _read_distributed_type(node: Node, place: str, stated: dict[str, Stated]) -> None:
    """Take from Accelerate's `distributed_type` what it says of the devices; the counts are stated by other keys."""
    word = (_scalar("distributed_type", node, place) or "NO").upper()
    word = "NO" if word == "FALSE" else word  # how YAML reads an unquoted `no`
    if word not in DISTRIBUTED_TYPES:
        raise Unsupported(
            f"{place}: distributed_type is {word}, which Farflung does not support. "
            f"Use one of {', '.join(DISTRIBUTED_TYPES)}; MULTI_CPU and MULTI_GPU train with DDP."
        )
    for name, value in DISTRIBUTED_TYPES[word].items():
        stated.setdefault(name, Stated(value, "file", place))
    if any(name.startswith(BLOCKS["fsdp_config"]) for name in stated):
        stated.setdefault("use_fsdp", Stated(False, "file", place))
    count = stated.get("num_processes")
    if word == "NO" and count is not None and isinstance(count.value, int) and count.value > 1:
        stated["num_processes"] = Stated(
            1,
            "file",
            place,
            f"one process, as {place} says distributed_type: NO, though {count.place} says num_processes: "
            f"{count.value}. Use MULTI_CPU or MULTI_GPU, or --num_processes, for more.",
        )


def write_file(path: Path, values: Mapping[str, Any]) -> Path:
    """Write the settings `values`, one line each, over an old file but never Accelerate's own, and return `path`."""
    path = check_path("The file of settings", path)
    if path.resolve() in [theirs.resolve() for theirs in accelerate_files()]:
        raise ConfigError(f"{path} is Accelerate's own file, which Farflung reads but never writes. Choose another.")
    LaunchSettings.of(values)
    stated = {name: value for name, value in values.items() if value is not None}
    text = "# Settings of `farflung launch`; `farflung launch --help all` explains each.\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as aside:
            aside.write_text(text + yaml.safe_dump(stated, sort_keys=False, allow_unicode=True), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error.strerror}. Name another file.") from error
    return path
