# SPDX-License-Identifier: Apache-2.0
"""The recipes as their source states them: names, arguments and help, read from the text of `methods/recipes.py`.

The names of the codecs come from `codec/named.py` in the same way.

This is the one place where a lower room looks into a higher one. Importing the recipes would load torch, which takes a
second that `farflung launch --help` must not take; parsing their text takes 3 ms. Only signatures and docstrings are
read: what a value may be is for the recipe to say. A test compares the result with what `inspect` finds.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_SOURCE = Path(__file__).parent.parent / "methods" / "recipes.py"
_CODECS = Path(__file__).parent.parent / "codec" / "named.py"
# What a flag or a file can state, by the name of its annotation. A mapping is written as text: `4:machine,64:all`.
_KINDS: Mapping[str, type] = {"int": int, "float": float, "bool": bool, "str": str, "Mapping": str}
_ARGUMENT = re.compile(r"    (\w+): (.+)")


@dataclass(frozen=True)
class Option:
    """An option of an outer loop that a flag or a file can set: an argument of recipes, or a setting that all have."""

    name: str
    kind: type  # int, float, bool or str
    help: str  # of its flag; of an argument, empty if another recipe has it
    choices: tuple[str, ...] = ()  # the words that it may be; empty: any
    is_needed: bool = False  # an argument without a default


def _read(source: str) -> dict[str, tuple[Option, ...]]:
    """Return the arguments of each recipe that `__all__` lists, by the recipe's name, in the order of the functions."""
    body = ast.parse(source).body
    functions = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
    listed = next(
        node.value for node in body if isinstance(node, ast.Assign) and _names(node.targets[0]) == ["__all__"]
    )
    recipes = ast.literal_eval(listed)
    return {name: tuple(_arguments(function)) for name, function in functions.items() if name in recipes}


def _keys(source: str, name: str) -> tuple[str, ...]:
    tables = [node for node in ast.parse(source).body if isinstance(node, ast.AnnAssign)]
    (table,) = (node.value for node in tables if _names(node.target) == [name])
    assert isinstance(table, ast.Dict)
    return tuple(ast.literal_eval(key) for key in table.keys if key is not None)


def _arguments(function: ast.FunctionDef) -> Iterator[Option]:
    arguments = function.args
    needed = arguments.args[: len(arguments.args) - len(arguments.defaults)]
    needed += [each for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if not default]
    texts = _texts(ast.get_docstring(function) or "")
    for each in (*arguments.args, *arguments.kwonlyargs):
        kind = next((_KINDS[name] for name in _names(each.annotation) if name in _KINDS), None)
        if kind is not None:
            yield Option(each.arg, kind, texts.get(each.arg, ""), is_needed=each in needed)


def _names(node: ast.expr | None) -> list[str]:
    """Return the names of a union's members, without what is in brackets: `Mapping` and `None`."""
    if isinstance(node, ast.BinOp):
        return _names(node.left) + _names(node.right)
    if isinstance(node, ast.Subscript):
        return _names(node.value)
    return [node.id] if isinstance(node, ast.Name) else []


def _texts(docstring: str) -> dict[str, str]:
    """Return what the section `Args:` says, by argument."""
    _, _, section = docstring.partition("\nArgs:\n")
    texts: dict[str, str] = {}
    for line in section.partition("\n\n")[0].splitlines():
        begins = _ARGUMENT.fullmatch(line)
        if begins:
            texts[begins[1]] = begins[2]
        else:
            texts[list(texts)[-1]] += f" {line.strip()}"
    return texts


def help_of(name: str) -> str:
    """Return what the recipes' docstrings say of an argument, as a flag's help.

    If they say different things, what one recipe alone says bears its name.
    """
    helps = {recipe: each.help for recipe, arguments in RECIPES.items() for each in arguments if each.name == name}
    if len(helps) == 1:
        return "".join(f"{recipe} only: {text}" for recipe, text in helps.items() if text)
    texts: dict[str, list[str]] = {}
    for recipe, text in helps.items():
        if text:
            texts.setdefault(text, []).append(recipe)
    named = len(texts) > 1
    return " ".join(
        f"{by[0]}: {text}" if named and len(by) == 1 else text[:1].upper() + text[1:] for text, by in texts.items()
    )


RECIPES: Mapping[str, tuple[Option, ...]] = _read(_SOURCE.read_text(encoding="utf-8"))
CODECS: tuple[str, ...] = _keys(_CODECS.read_text(encoding="utf-8"), "CODECS")
