# SPDX-License-Identifier: Apache-2.0
"""`docs/glossary.md` has the noun of every class of the package, so that a reader of the code finds it there."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
SOURCE = ROOT / "src" / "farflung"


def classes():
    """The public classes of the package that are no exceptions, with the files that they are in."""
    found, bases = {}, {}
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and node.name[0] != "_":
                found[node.name] = path.relative_to(SOURCE).as_posix()
                bases[node.name] = [ast.unparse(base) for base in node.bases]

    def is_exception(name):
        return name == "Exception" or any(map(is_exception, bases.get(name, ())))

    return {name: file for name, file in found.items() if not is_exception(name)}


def words_of(name):
    """The words in a name: `DataLoaderShard` is `data loader shard`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", name).lower()


def glossary():
    """The terms that the glossary explains, and the names in the code that it mentions."""
    rows = [line for line in (ROOT / "docs" / "glossary.md").read_text().splitlines() if line.startswith("| **")]
    terms = {term.lower() for row in rows for term in re.findall(r"\*\*(.+?)\*\*", row.split(" | ")[0])}
    return terms | {term.removesuffix("s") for term in terms}, set(re.findall(r"`(\w+)`", "\n".join(rows)))


def nouns_of(name):
    """What stands for a class in the glossary: its name in words, or the last one of these, its head."""
    words = words_of(name)
    return {words, words.removesuffix("s"), words.split()[-1], words.split()[-1].removesuffix("s")}


def test_the_glossary_has_the_noun_of_every_class():
    terms, names = glossary()
    missing = [
        f"{name} ({file}): a row for **{words_of(name)}** or **{words_of(name).split()[-1]}**, or `{name}` in a row"
        for name, file in classes().items()
        if name not in names and not nouns_of(name) & terms
    ]
    assert not missing, "docs/glossary.md lacks\n" + "\n".join(missing)


def test_the_glossary_explains_each_term_once():
    rows = [line for line in (ROOT / "docs" / "glossary.md").read_text().splitlines() if line.startswith("| **")]
    terms = [term.lower() for row in rows for term in re.findall(r"\*\*(.+?)\*\*", row.split(" | ")[0])]
    assert sorted(set(terms)) == sorted(terms)


def test_each_class_that_the_glossary_names_is_there():
    _, names = glossary()
    named = {name for name in names if re.fullmatch(r"(?:[A-Z][a-z0-9]+)+", name)} - {"DataLoader"}
    assert not named - classes().keys(), "docs/glossary.md names classes that are no more"
