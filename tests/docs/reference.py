# SPDX-License-Identifier: Apache-2.0
"""The pages of reference, `docs/reference`, from the package's doors: `python -m tests.docs.reference` writes them.

A page names what there is; the site takes the text from the docstrings. A name that several doors hand on stands once.
"""

import importlib
from itertools import groupby
from types import ModuleType
from typing import Any, NamedTuple

from tests.docs.examples import EXAMPLES
from tests.docs.test_pages import ROOT

FOLDER = ROOT / "docs" / "reference"
ACCELERATE = "Names of Accelerate's, at its paths. What differs from Accelerate: [migrating](../migrating.md)."
TESTING = "testing.simulate:simulate testing.ranks:run_ranks testing.sim:run_replicas"
OTHER = "state optimizer scheduler logging memory_utils big_modeling launchers local_sgd parallelism_config"
COMMANDS = " ".join(f"commands.{name}" for name in ("launch", "config", "estimate", "merge", "test", "to_fsdp2", "env"))
# A page's name, what it says first, and its doors. A door that is a room of ours has its few public names with it.
PAGES = {
    "farflung": ("What scripts import first. `import farflung` loads no torch: a name is loaded at its first use.", ""),
    "outer": ("The outer loop: recipes, and the parts that they are made of. It needs torch alone.", "outer"),
    "elastic": ("Replicas that come and go, in a loop of your own: [elastic](../elastic.md).", "elastic"),
    "integrations": ("Other libraries: [transformers](../transformers.md).", "integrations.transformers:OuterCallback"),
    "tracking": ("Experiment trackers, and how to write one: [tracking](../tracking.md).", "tracking"),
    "testing": ("Several replicas on one machine: [simulate](../simulate.md).", TESTING),
    "data_loader": (ACCELERATE, "data_loader"),
    "hooks": (ACCELERATE, "hooks"),
    "utils": (ACCELERATE, "utils"),
    "other": (ACCELERATE, OTHER),
    "commands": (ACCELERATE, COMMANDS),
    "test_utils": (ACCELERATE, "test_utils"),
}
TITLES = {"farflung": "farflung", "other": "Accelerate's other doors"}
PLAIN = (bool, int, float, str, tuple, list, dict, set, frozenset, type(None))


def public(door):
    """The public names of a door: `__all__`, or all that it hands on of ours."""
    module = importlib.import_module(door)
    return [*getattr(module, "__all__", ())] or [n for n, value in vars(module).items() if n[0] != "_" and ours(value)]


def ours(value):
    owner = getattr(value, "__module__", "") or ""
    return not isinstance(value, ModuleType) and (owner.startswith("farflung") or isinstance(value, PLAIN))


class Entry(NamedTuple):
    """A public name: the door that has it, its path there, and the path where the reference describes it."""

    door: str
    name: str
    value: Any
    page: str
    there: str

    @property
    def own(self):
        return f"{self.door}.{self.name}"

    @property
    def anchored(self):
        return f'<a id="{self.own}"></a>`{self.name}`'

    @property
    def summary(self):
        """The first sentences about what exists for Accelerate's names alone, unless the name says it all."""
        is_plain = isinstance(self.value, PLAIN) or self.name.startswith(("is_", "require_"))
        said = "" if is_plain else (self.value.__doc__ or "").partition("\n\n")[0]
        return " ".join(said.split()).replace("|", "\\|")


def entries():
    """The entries of each page, in order. Each value is described where it comes first."""
    first, found = {}, {}
    for page, (_, doors) in PAGES.items():
        for door, _, listed in (each.partition(":") for each in doors.split(" ")):
            path = f"farflung.{door}".rstrip(".")
            for name in listed.split() or public(path):
                value = getattr(importlib.import_module(path), name)
                key = name if isinstance(value, PLAIN) else id(value)
                there = first.setdefault(key, (page, f"{path}.{name}"))
                found.setdefault(page, []).append(Entry(path, name, value, *there))
    return found


def pages():
    found = {}
    for page, entered in entries().items():
        about, doors = PAGES[page]
        parts = [f"# {TITLES.get(page, f'farflung.{page}')}", about]
        for door, group in groupby(entered, lambda each: each.door):
            parts += [f"## {door}"] * (" " in doors)
            rows, names, known = [], [], []
            for each in group:
                if each.there != each.own:
                    known.append(f"[`{each.name}`]({each.page}.md#{each.there})")
                elif isinstance(each.value, PLAIN) or "compat" in getattr(each.value, "__module__", ""):
                    if each.summary:
                        rows.append(f"| {each.anchored} | {each.summary} |")
                    else:
                        names.append(each.anchored)
                else:
                    parts.append(f"::: {each.own}")
                    if each.own in EXAMPLES:
                        parts.append(f"```python run\n{EXAMPLES[each.own]}```")
            parts += ["\n".join(["| name | what it is |", "| --- | --- |", *rows])] * bool(rows)
            parts += ["By name alone: " + ",\n".join(names) + "."] * bool(names)
            parts += ["Also here: " + ",\n".join(known) + "."] * bool(known)
        found[FOLDER / f"{page}.md"] = "\n\n".join(parts) + "\n"
    return found


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for file, text in pages().items():
        file.write_text(text, encoding="utf-8")
