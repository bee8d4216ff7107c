# SPDX-License-Identifier: Apache-2.0
"""Farflung answers `import accelerate` where that is asked for: in a process and its children, nowhere else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from farflung.config import environ
from farflung.integrations.as_accelerate import FOLDER, path_variables
from tests.python import run_python

# Says who answers here and in child processes of three kinds. `base` is a room that loads without torch.
PROBE = """
import json, multiprocessing, subprocess, sys
from importlib.metadata import metadata, version
from importlib.util import find_spec

def look(_=None):
    import accelerate.base.words
    import farflung.base.words
    ours = accelerate.base.words is farflung.base.words is sys.modules["accelerate.base.words"]
    return [ours, accelerate.__version__, version("accelerate"), "Farflung" in metadata("accelerate")["Summary"]]

if __name__ == "__main__":
    SETUP
    import accelerate
    code = "import accelerate; print(accelerate.__version__, accelerate.__file__)"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        spawned = pool.map(look, [0])[0]
    print(json.dumps({"here": look(), "spawned": spawned, "child": child.stdout.split(), "file": accelerate.__file__,
                      "spec": find_spec("accelerate").origin}))
"""
LOOK = "import accelerate, sys; print(accelerate.__file__, [type(f).__module__ for f in sys.meta_path], sys.path)"


def run(*command, code=None):
    """What a fresh process prints."""
    return run_python(*command, *(() if code is None else ("-c", code))).stdout


def launched_in(tmp_path, monkeypatch, setup, *flags):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "probe.py").write_text(PROBE.replace("SETUP", setup))
    start = ("-m", "farflung", "launch", "--num_processes", "1", *flags) if flags else ()
    return json.loads(run(*start, "probe.py").splitlines()[-1])


@pytest.mark.parametrize(
    ("setup", "flags"),
    [
        ("import farflung; farflung.install_as_accelerate(); farflung.install_as_accelerate()", ()),
        ("", ("--as-accelerate",)),
    ],
    ids=["install_as_accelerate", "--as-accelerate"],
)
def test_imports_and_the_version_are_answered_here_and_in_children(tmp_path, monkeypatch, setup, flags):
    seen = launched_in(tmp_path, monkeypatch, setup, *flags)
    assert seen["here"] == seen["spawned"] == [True, "1.15.0", "1.15.0", True]
    assert seen["child"] == ["1.15.0", seen["file"]]
    assert seen["file"] == seen["spec"]
    assert "farflung" in seen["file"]


@pytest.mark.parametrize(("before", "after"), [(None, ""), ("", ""), ("a::b", ":a::b"), ("src:", ":src:")])
def test_an_empty_entry_of_the_path_stays_the_current_folder(before, after):
    with environ.patched({"PYTHONPATH": before}):
        assert path_variables() == {"PYTHONPATH": f"{FOLDER}{after}"}
    with environ.patched({"PYTHONPATH": f"{FOLDER}{after}"}):
        assert path_variables() == {"PYTHONPATH": f"{FOLDER}{after}"}


@pytest.mark.long
def test_without_the_flag_nothing_is_touched(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "look.py").write_text(f"import farflung, farflung.utils\n{LOOK}")
    seen = run("-m", "farflung", "launch", "--cpu", "look.py")
    assert Path(seen.split()[0]).parent.name == "accelerate"
    assert "integrations" not in seen


IN_A_REPLICA = """
from farflung.integrations.as_accelerate import install_for_replica
install_for_replica()
import accelerate, accelerate.utils
print(accelerate.__file__)
"""


def test_a_replica_that_comes_and_goes_gets_it_without_the_flag_and_says_so():
    done = run_python("-c", IN_A_REPLICA)
    assert "farflung" in Path(done.stdout.strip()).parts
    assert done.stderr.count("`import accelerate` is answered by Farflung") == 1


def test_the_names_are_farflungs_and_what_it_lacks_says_so():
    *said, fields = run(
        code="""
import farflung; farflung.install_as_accelerate()
import accelerate
from accelerate import Accelerator, utils
import accelerate.state as state
import farflung.utils
assert Accelerator is farflung.Accelerator and utils is farflung.utils and state is farflung.state
assert accelerate.logging is farflung.logging and {"Accelerator", "__version__"} <= set(dir(accelerate))
lines = "import accelerate.nowhere; import accelerate.utils.nowhere; accelerate.nowhere; from accelerate import nowhere"
for line in lines.split("; "):
    try: exec(line)
    except (ImportError, AttributeError) as error: print(type(error).__name__, error)
from importlib.metadata import metadata
fields = metadata("accelerate")
print([fields[name] for name in ("Name", "Home-page", "Author", "License")], "huggingface" in fields["Home-page"])
"""
    ).splitlines()
    for line, words in zip(
        said,
        (
            "ModuleNotFoundError No module named 'accelerate.nowhere': Farflung answers for accelerate",
            "ModuleNotFoundError No module named 'accelerate.utils.nowhere': Farflung answers",
            "AttributeError module 'accelerate' has no attribute 'nowhere' (Farflung answers",
            "ImportError cannot import name 'nowhere' from 'accelerate'",
        ),
        strict=True,
    ):
        assert line.startswith(words)
    assert fields.endswith("True")  # by which libraries know Accelerate
    assert "None" not in fields


def test_the_command_by_its_module_is_refused():
    code = "import farflung, runpy; farflung.install_as_accelerate(); runpy.run_module('accelerate.commands.launch')"
    done = run_python("-c", code, code=1)
    assert "can't be run where Farflung answers for accelerate. Use `farflung launch`." in done.stderr


def test_an_accelerate_that_is_loaded_already_is_an_error():
    said = run(
        code="""
import sys, types
sys.modules["accelerate"] = real = types.ModuleType("accelerate")
real.__file__ = "/elsewhere/accelerate/__init__.py"
import farflung
try: farflung.install_as_accelerate()
except farflung.base.errors.StateError as error: print(error)
"""
    )
    assert "accelerate was already imported, from /elsewhere/accelerate/__init__.py" in said
    assert "--as-accelerate" in said
