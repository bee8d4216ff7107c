# SPDX-License-Identifier: Apache-2.0
"""Each name of ours that a page mentions exists: `Class`, `Class.member`, `module.function`, `accelerator.method`."""

import ast
import builtins
import importlib
import re
from functools import cache

import pytest

from tests.docs.test_pages import ROOT, TEXTS, prose

SOURCE = ROOT / "src" / "farflung"
_CODE = re.compile(r"`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?:\(.*?\))?`")
# What pages call an object of ours.
OBJECTS = {
    "accelerator": ("Accelerator",),
    "group": ("TorchGroup", "SimGroup"),
    "local_sgd": ("LocalSGD",),
    "outer": ("OuterLoop",),
    "plugin": ("FullyShardedDataParallelPlugin",),
    "strategy": ("Strategy",),
}
# Names of modules of ours that are objects of torch's, other packages or a script's file on pages.
OTHERS = ("accelerate", "dataclasses", "model", "optimizer", "scheduler", "train", "transformers")
# Of libraries, of papers, of scripts, of Accelerate where a page says that they are not here, of WireGuard, of a run's
# folder, and of JSON.
FOREIGN = """
BatchEncoding Delta F.linear OptimizedModule StackDataset Trainer Trainer.evaluate TrainingArguments SDPBackend.MATH
ZeroRedundancyOptimizer evidence.redo farflung.json farflung.trackers farflung.x PersistentKeepalive private.key
EPOCH_COMPLETED ITERATION_COMPLETED ModelCheckpoint idist.Parallel idist.auto_dataloader auto_model ckpt_path
idist.auto_model model.fit save_weights toggle_optimizer rounds.jsonl run.json events.jsonl report.html CHANGELOG.md
Infinity NaN
"""


@cache
def trees():
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCE.rglob("*.py")}


@cache
def named(tree):
    """What the source mentions: functions, variables, attributes, imports."""
    found = set()
    for node in ast.walk(tree):
        words = [getattr(node, key, None) for key in ("name", "id", "attr", "arg", "asname")]
        found.update(word for word in words if isinstance(word, str))
    return found


@cache
def mentioned():
    return set().union(*map(named, trees().values()), vars(builtins))


@cache
def classes():
    """The classes of the package by name: what each mentions, and its bases."""
    found = {}
    for tree in trees().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                names, bases = found.setdefault(node.name, (set(), []))
                names |= named(node)
                bases += [re.findall(r"\w+", ast.unparse(base).split("[")[0])[-1] for base in node.bases]
    return found


def has_member(name, member):
    names, bases = classes().get(name, (set(), []))
    return member in names or any(has_member(base, member) for base in bases)


@cache
def modules():
    """The modules of the package by the ends of their paths, `clip` and `loop.clip`, with what they mention."""
    found = {}
    for path, tree in trees().items():
        parts = path.relative_to(SOURCE).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        for start in range(len(parts)):
            found.setdefault(".".join(parts[start:]), set()).update(named(tree))
    return found


def is_imported(path):
    """Whether `farflung.a.b` is a module, or an attribute of one."""
    module, _, name = path.rpartition(".")
    try:
        importlib.import_module(path)
    except ImportError:
        return bool(module) and hasattr(importlib.import_module(module), name)
    return True


def exists(name):
    """Whether `name` is there, as far as it is one of ours."""
    first, *rest = name.split(".")
    module, _, last = name.rpartition(".")
    if name in FOREIGN.split() or first in OTHERS:
        return True
    if first == "farflung":
        return is_imported(name)
    if rest and (first in OBJECTS or first[0].isupper()):
        return any(has_member(name, rest[0]) for name in OBJECTS.get(first, (first,)))
    if module in modules() and name not in modules():
        return last in modules()[module]
    return rest != [] or not re.match("[A-Z][a-z]", name) or name in mentioned()


@pytest.mark.parametrize("page", TEXTS)
def test_names_of_ours_exist(page):
    odd = sorted({name for name in _CODE.findall(prose(TEXTS[page])) if not exists(name)})
    assert not odd, f"{page} mentions {', '.join(odd)}: mend it, or add what is not ours to FOREIGN"
