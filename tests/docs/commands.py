# SPDX-License-Identifier: Apache-2.0
"""The page of commands, `docs/commands.md`, from the tables of the sources: `python -m tests.docs.commands` writes it.

What stands above its first line of hyphens is written by hand and kept.
"""

from pathlib import Path

from farflung.config.groups import GROUPS
from farflung.config.launch import FIELDS
from farflung.launch.checkpoint import checkpoint
from farflung.launch.main import COMMANDS

PAGE = Path(__file__).parent.parent.parent / "docs" / "commands.md"
CUT = "\n---\n"


def table(head, rows):
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def flag_row(entry):
    words = ", ".join(f"`{flag}`" for flag in entry.flags)
    takes = "" if entry.kind is bool else f" `{'|'.join(entry.choices) or entry.kind.__name__}`"
    known = entry.kind is not bool and entry.default not in (None, "")
    text = f"{entry.help} [{entry.default}]" if known else entry.help
    words += "" if entry.in_file else " *"
    is_usual = f"--{entry.variable.removeprefix('FARFLUNG_').lower()}" in entry.flags
    variable = "" if is_usual else f"`{entry.variable}`"
    return [f"{words}{takes}".replace("|", "\\|"), text.replace("|", "\\|"), variable]


def generated():
    texts = {name: text for name, (_, text) in COMMANDS.items()}
    texts |= {f"checkpoint {name}": command.short_help for name, command in checkpoint.commands.items()}
    rows = [[f"`farflung {name}`", text] for name, text in texts.items()]
    parts = ["## Commands", table(["command", "does"], rows), "## The flags of `farflung launch`"]
    parts.append(
        "Each has an environment variable, `FARFLUNG_` and its name if none is shown, and, without a `*`, a key of\n"
        "the same name in a file of settings. `_` and `-` are alike: `--num_processes`, `--num-processes`."
    )
    for group, about in GROUPS.items():
        rows = [flag_row(entry) for entry in FIELDS if entry.group == group]
        parts += [f"### {group}: {about.about}", table(["flag", "meaning", "variable"], rows)]
    return "\n\n".join(parts) + "\n"


def page():
    return PAGE.read_text(encoding="utf-8").partition(CUT)[0] + CUT + "\n" + generated()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
