# SPDX-License-Identifier: Apache-2.0
"""Accelerate's names, compared with the installed Accelerate: names.toml says of each whether it is the same here.

A new release of Accelerate shows here what it has added and removed.
"""

import ast
import importlib
import inspect
import pkgutil
import re
import warnings
from enum import EnumMeta
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import accelerate
import pytest

from farflung.base.errors import Unsupported
from farflung.compat import absent as absent_names

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
GATHERED = ("", "utils", "test_utils")  # modules whose names are defined elsewhere, and imported from here


def tables(text: str) -> dict[str, dict[str, Any]]:
    """The tables of names.toml, which needs no more of TOML than strings; Python reads TOML itself from 3.11 on."""
    found: dict[str, dict[str, Any]] = {}
    on_one_line = re.sub(r'"""(.*?)"""', lambda match: f'"{" ".join(match[1].split())}"', text, flags=re.S)
    for line in on_one_line.splitlines():
        if line.startswith("["):
            table = found.setdefault(line.strip("[]"), {})
        elif line and not line.startswith("#"):
            key, value = line.split(" = ", 1)
            table[key.strip('"')] = value.strip('"')
    return found


TABLES = tables((HERE / "names.toml").read_text())
SAME = {(module, name) for module, names in TABLES["same"].items() for name in names.split()}
ABSENT = {(module, name) for module, names in TABLES["absent"].items() for name in names.split()}
DIFFERS = {tuple(key.rsplit(".", 1)): row for key, row in TABLES["differs"].items()}
LEFT_OUT = TABLES["left out"]


@cache
def modules() -> dict[str, ModuleType]:
    """All modules of Accelerate's that are no programs, by their path below the package."""
    found = {"": accelerate}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for each in pkgutil.walk_packages(accelerate.__path__, "accelerate."):
            path = each.name.removeprefix("accelerate.")
            if not any(path == left or path.startswith(f"{left}.") for left in LEFT_OUT):
                found[path] = importlib.import_module(each.name)
    return found


def ours(path: str) -> ModuleType:
    return importlib.import_module(f"farflung.{path}".rstrip("."))


@cache
def names() -> set[tuple[str, str]]:
    """Each public name with the module that defines it."""
    found = set()
    for path, module in modules().items():
        for name, value in vars(module).items():
            is_own = getattr(value, "__module__", None) == module.__name__
            is_constant = path == "utils.constants" and name.isupper()
            if name[0] != "_" and name != "main" and (is_own or is_constant):
                found.add((path, name))
    return found


def test_each_name_of_accelerates_is_listed_and_none_that_is_no_more():
    listed = SAME | ABSENT | set(DIFFERS)
    assert sorted(names() - listed) == [], "new in Accelerate, or a new path: list them in names.toml"
    assert sorted(listed - names()) == [], "no longer in Accelerate"
    assert not SAME & ABSENT
    assert not (SAME | ABSENT) & set(DIFFERS)


def test_each_name_is_imported_from_the_same_path():
    missing = [f"{path}: {name}" for path, name in sorted(names()) if not hasattr(ours(path), name)]
    for path in GATHERED:
        theirs = {
            name
            for name, value in vars(modules()[path]).items()
            if name[0] != "_" and not isinstance(value, ModuleType) and "accelerate" in getattr(value, "__module__", "")
        }
        missing += [f"{path}: {name}" for name in sorted(theirs) if not hasattr(ours(path), name)]
        assert len(theirs) > 20
    assert missing == []


def parameters(function: Any) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # an exception's
        return None


def shown(default: Any) -> str:
    return default.__name__ if inspect.isfunction(default) else repr(getattr(default, "value", default))


def takes_the_same(mine: Any, other: Any) -> bool:
    """Whether `mine` has the parameters of `other`, in their order and with their defaults; it may have more."""
    wanted, found = parameters(other), parameters(mine)
    if wanted is None or found is None:
        return wanted == found
    named = {each.name: each for each in found}
    by_place = [each.name for each in wanted if each.kind is each.POSITIONAL_OR_KEYWORD]
    return [each.name for each in found[: len(by_place)]] == by_place and all(
        each.name in named and (each.default is each.empty or shown(named[each.name].default) == shown(each.default))
        for each in wanted
    )


def test_what_is_the_same_takes_the_same_arguments():
    wrong = []
    for path, name in sorted(SAME):
        mine, other = getattr(ours(path), name), getattr(modules()[path], name)
        if is_absent(mine):
            wrong.append(f"{path}.{name} is absent")
        elif callable(other) and not is_inherited(other) and not takes_the_same(mine, other):
            wrong.append(f"{path}.{name}")
    assert wrong == []


def is_inherited(value: Any) -> bool:
    """Whether this is a class whose constructor is Python's own, which changes with Python."""
    return inspect.isclass(value) and "__init__" not in vars(value)


def lacking(mine: type, other: type) -> set[str]:
    """The public members of `other` that `mine` lacks, or that take other arguments there."""
    fields = {*getattr(mine, "__dataclass_fields__", {}), *dir(mine)}
    methods = {name for name, value in vars(other).items() if inspect.isfunction(value) and name in fields}
    differ = {
        name
        for name in methods
        if [each.kind for each in parameters(getattr(other, name)) or ()][-2:-1] != [inspect.Parameter.VAR_POSITIONAL]
        and not takes_the_same(getattr(mine, name), getattr(other, name))
    }
    return {name for name in {*vars(other)} - fields | differ if name[0] != "_"}


def test_classes_have_the_same_members():
    found = {}
    for path, name in sorted(SAME | {("accelerator", "Accelerator")}):
        other = getattr(modules()[path], name)
        is_plain = inspect.isclass(other) and not isinstance(other, EnumMeta)
        if is_plain and (members := lacking(getattr(ours(path), name), other)):
            found[f"{path}.{name}"] = " ".join(sorted(members))
    assert found == TABLES["members"]


def is_absent(value: Any) -> bool:
    return getattr(value, "__module__", "") == absent_names.__name__ and value is not absent_names.deepspeed_required


@pytest.mark.parametrize("path", sorted({path for path, _ in ABSENT}))
def test_what_is_absent_says_so_when_it_is_used(path):
    for name in (name for where, name in sorted(ABSENT) if where == path):
        value = getattr(ours(path), name)
        with pytest.raises(Unsupported, match=r" belongs to .+, which Farflung does not support\. [A-Z]"):
            value(1, some=2).parse_args([])  # of a parser, which programs make when they are imported
        if isinstance(value, type):
            assert not isinstance(3, value)
            derived = type("Derived", (value,), {})
            with pytest.raises(Unsupported, match="Derived"):
                derived()


def test_what_differs_has_its_row():
    page = (ROOT / "docs" / "migrating.md").read_text()
    assert [name for name, row in DIFFERS.items() if f"`{row}`" not in page] == []


def test_the_readme_lists_what_is_not_there():
    last = (ROOT / "README.md").read_text().split("\n## ")[-1]
    sentence = re.match(r"What is not there (.+?)\.", " ".join(last.split()))
    assert sentence, "README.md has no last section with the title `What is not there`"
    listed = {item.strip() for item in re.split(r", | and ", sentence[1])}
    others = ("Accelerate's ", "the inside of Accelerate", "binding processes")  # than what does something for a run
    assert listed == {each.what for each in absent_names.ABSENT if not each.what.startswith(others)}


@cache
def mentioned() -> set[str]:
    """What the tests call or read, by name: a rough measure, for a name may be mentioned in passing."""
    found = set()
    for file in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(file.read_text())) if file.name != Path(__file__).name else ():
            if isinstance(node, (ast.Attribute, ast.Name, ast.alias)):
                found.update({getattr(node, key, None) for key in ("attr", "id", "name")})
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.update(node.value.split() if len(node.value) < 300 else ())
    return found


def test_nine_tenths_of_what_is_the_same_is_tested():
    untested = sorted(f"{path}.{name}" for path, name in SAME if name not in mentioned() and not is_compared(name))
    assert len(untested) < 0.1 * len(SAME), untested


def is_compared(name: str) -> bool:
    """Whether tests/compat compares all names of this kind, without naming each."""
    return name.isupper() or name.startswith("require_") or (name.startswith("is_") and name.endswith("_available"))
