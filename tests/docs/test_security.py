# SPDX-License-Identifier: Apache-2.0
"""What SECURITY.md says of code in files and messages: few places unpickle, and none of them what replicas exchange."""

import ast

from tests.docs.test_pages import ROOT

SOURCE = ROOT / "src" / "farflung"
# What is unpickled: objects that a script gathers or scatters among the ranks of one world, states of random numbers
# that a loader's own workers send, values of `run_ranks`; and files whose reader knows numbers alone.
UNPICKLING = {
    "comm/collectives.py",
    "comm/scatter.py",
    "checkpoint/rng.py",
    "testing/ranks.py",
    "checkpoint/sharded.py",
}


def calls(tree):
    """The functions of modules that a file calls: `pickle.loads`."""
    for node in ast.walk(tree):
        target = node.func if isinstance(node, ast.Call) else next(iter(getattr(node, "bases", [])), None)
        if isinstance(target, ast.Attribute):
            yield ast.unparse(target)


def users(*names):
    files = {file.relative_to(SOURCE).as_posix(): file.read_text(encoding="utf-8") for file in SOURCE.rglob("*.py")}
    last = [name.rpartition(".")[2] for name in names]
    candidates = {name: text for name, text in files.items() if any(word in text for word in last)}
    return {name for name, text in candidates.items() if set(names) & set(calls(ast.parse(text)))}


def test_few_places_unpickle_and_none_of_them_what_replicas_exchange():
    assert users("pickle.loads", "pickle.load", "pickle.Unpickler") == UNPICKLING


def test_files_are_loaded_without_code_unless_a_script_asks_for_it():
    assert users("torch.load") == {"checkpoint/reader.py"}
    reader = (SOURCE / "checkpoint" / "reader.py").read_text(encoding="utf-8")
    assert 'torch.load(f, map_location=map_location, **{"weights_only": True, **kwargs})' in reader
    assert not users("yaml.load", "yaml.unsafe_load", "yaml.full_load")
