# SPDX-License-Identifier: Apache-2.0
"""The pages of reference, `docs/reference`, from the doors of the package: `python -m tests.docs.reference` writes them.

A page names what there is; the site takes the text from the docstrings. A name that several doors hand on stands once.
"""

import importlib
from types import ModuleType

from tests.docs.test_pages import ROOT

FOLDER = ROOT / "docs" / "reference"
ACCELERATE = "Names of Accelerate's, at its paths. What differs from Accelerate: [migrating](../migrating.md)."
# A page's name, what it says first, and its doors. A door that is a room of ours has its few public names with it.
PAGES = {
    "farflung": ("What scripts import first. `import farflung` loads no torch; each name is loaded at its first use.", ""),
    "outer": ("The outer loop: recipes, and the parts that they are made of. It needs torch alone.", "outer"),
    "elastic": ("Replicas that come and go, in a loop of your own: [elastic](../elastic.md).", "elastic"),
    "integrations": ("Other libraries: [transformers](../transformers.md).", "integrations.transformers:OuterCallback"),
    "tracking": ("Experiment trackers, and how to write one: [tracking](../tracking.md).", "tracking"),
    "testing": (
        "Several replicas on one machine: [simulate](../simulate.md).",
        "testing.simulate:simulate testing.ranks:run_ranks testing.sim:run_replicas",
    ),
    "data_loader": (ACCELERATE, "data_loader"),
    "hooks": (ACCELERATE, "hooks"),
    "utils": (ACCELERATE, "utils"),
    "other": (
        ACCELERATE,
        "state optimizer scheduler logging memory_utils big_modeling launchers local_sgd parallelism_config",
    ),
    "commands": (
        ACCELERATE,
        "commands.launch commands.config commands.estimate commands.merge commands.test commands.to_fsdp2 commands.env",
    ),
    "test_utils": (ACCELERATE, "test_utils"),
}
PLAIN = (bool, int, float, str, tuple, list, dict, set, frozenset, type(None))


def public(door):
    """The public names of a door: `__all__`, or all that it hands on of ours."""
    module = importlib.import_module(door)
    return [*getattr(module, "__all__", ())] or [n for n, value in vars(module).items() if n[0] != "_" and ours(value)]


def ours(value):
    owner = getattr(value, "__module__", "") or ""
    return not isinstance(value, ModuleType) and (owner.startswith("farflung") or isinstance(value, PLAIN))


def line(name, path, value):
    """A row for what exists for Accelerate's names alone, and for constants: its anchor, and a sentence or its value."""
    said = repr(value) if isinstance(value, PLAIN) else (value.__doc__ or "-").strip().partition("\n\n")[0]
    said = " ".join(said.split()).replace("|", "\\|")
    said = said if not isinstance(value, PLAIN) else f"`{said if len(said) < 80 else said[:76] + ' ...'}`"
    return f'| <a id="{path}"></a>`{name}` | {said} |'


def pages():
    """The text of each page, by its file."""
    first, where, found = {}, {}, {}
    for page, (about, doors) in PAGES.items():
        parts = [about]
        for door, _, listed in (each.partition(":") for each in doors.split(" ")):
            path = f"farflung.{door}".rstrip(".")
            module = importlib.import_module(path)
            whole, rows, known = [], [], []
            for name in listed.split() or public(path):
                value = getattr(module, name)
                own = f"{path}.{name}"
                there = first.setdefault(name if isinstance(value, PLAIN) else id(value), own)
                where.setdefault(own, f"{page}.md")
                if there != own:
                    known.append(f"[`{name}`]({where[there]}#{there})")
                elif isinstance(value, PLAIN) or "compat" in getattr(value, "__module__", ""):
                    rows.append(line(name, own, value))
                else:
                    whole.append(f"::: {own}")
            parts += [f"## {path}"] * (" " in doors) + whole
            parts += ["\n".join(["| name | what it is |", "| --- | --- |", *rows])] * bool(rows)
            parts += ["Also here: " + ",\n".join(known) + "."] * bool(known)
        title = "Accelerate's other doors" if page == "other" else page if page == "farflung" else f"farflung.{page}"
        found[FOLDER / f"{page}.md"] = "\n\n".join([f"# {title}", *parts]) + "\n"
    return found


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for file, text in pages().items():
        file.write_text(text, encoding="utf-8")
