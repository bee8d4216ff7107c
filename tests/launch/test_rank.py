# SPDX-License-Identifier: Apache-2.0
"""A rank runs its script as Python itself would, and leaves a report of its failure wherever that happens."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess

import pytest

from farflung.config import environ
from farflung.launch.plan import RANK
from farflung.launch.shell import start_of
from tests.python import run_python

RANK_STARTER = start_of(RANK)[1:]
SEEN = """
import json, multiprocessing, pickle, sys
class Thing:
    pass
def double(x: int):
    return 2 * x
if __name__ == "__main__":
    pickle.loads(pickle.dumps(Thing()))
    doubled = None
    if not __file__.endswith("__main__.py"):  # spawned processes don't load such a file, under no launcher
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            doubled = pool.map(double, [1, 2])
    spec = None if __spec__ is None else __spec__.name
    loads = type(__loader__).__name__
    print(json.dumps([sys.argv, sys.path[0], __file__, spec, loads, __package__, doubled, str(double.__annotations__)]))
    print("torch" in sys.modules)
"""


def run(*words: str, file=None) -> subprocess.CompletedProcess[str]:
    with environ.patched({"TORCHELASTIC_ERROR_FILE": None if file is None else str(file), "RANK": "1"}):
        return run_python("-u", *words, code=None)


PACKED, MODULES = [("packed",), ("packed.zip",)], [("-m", "package.train", "b"), ("-m", "package")]


@pytest.mark.parametrize("words", [("train.py", "-m", "x y"), ("link.py",), *PACKED, *MODULES])
def test_a_script_sees_what_it_would_see_without_a_launcher(words, home):
    for name in ("train.py", "folder/train.py", "packed/__main__.py", "package/train.py", "package/__main__.py"):
        (home / name).parent.mkdir(exist_ok=True)
        (home / name).write_text(SEEN)
    (home / "link.py").symlink_to("folder/train.py")
    shutil.make_archive("packed", "zip", "packed")
    plain, ranked = run(*words), run(*RANK_STARTER, *words)
    assert (plain.returncode, plain.stderr) == (0, "")
    assert (ranked.stdout, ranked.stderr, ranked.returncode) == (plain.stdout, "", 0)


LAUNCH = (*start_of("farflung.launch.main")[1:], "launch", "--cpu")


@pytest.mark.parametrize("safe", ["", "1"])
def test_each_process_of_ours_looks_for_modules_where_python_does_for_a_script(safe, home, monkeypatch):
    """And so takes no file of the current folder for a module of Python's or of a package."""
    monkeypatch.setenv("PYTHONSAFEPATH", safe)
    monkeypatch.setenv("PYTHONPATH", "known")
    for name in ["types", "random", "secrets", "signal", "json", "torch", "click", "runpy"]:
        (home / f"{name}.py").write_text("raise SystemExit('a file of the current folder')\n")
    for folder in ("known", "scripts"):
        (home / folder).mkdir()
    (home / "known" / "known.py").touch()
    (home / "scripts" / "train.py").write_text("import known, sys\nprint(sys.path)\n")
    plain, *ours = (run(*start, "scripts/train.py") for start in ((), RANK_STARTER, LAUNCH))
    assert plain.stdout.startswith("['")
    assert [(one.stdout, one.stderr) for one in ours] == [(plain.stdout, "")] * 2


@pytest.mark.parametrize("folder", ["", "run"])
def test_a_line_of_several_words_is_one_write_so_that_ranks_share_a_pipe(folder, home, monkeypatch):
    (home / "run").mkdir()
    monkeypatch.setenv(environ.RUN_FOLDER, folder)
    says = "print('step', 1)\nprint('no', end=' ')\nprint('end')\nprint('oh', 'no', file=sys.stderr)\n"
    (home / "train.py").write_text(f"import sys\n{says}")
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # which keeps writes apart
    with ours, its:
        words = [*start_of(RANK), "train.py"]
        subprocess.run(words, stdout=its.fileno(), stderr=its.fileno(), check=True)
        its.close()
        assert [ours.recv(100) for _ in range(4)] == [b"step 1\n", b"no end\n", b"oh no\n", b""]


HOOK = """
import sys
sys.excepthook = lambda *_: sys.stderr.write(f"{sys.last_type.__name__}: {sys.last_value}: {sys.last_traceback}")
raise ValueError("bad")
"""


@pytest.mark.parametrize(
    ("code", "script", "words", "num_frames"),
    [
        ("x = = 1\n", ["train.py"], "SyntaxError: invalid syntax", 1),
        ("import no_such_module\n", ["train.py"], "ModuleNotFoundError: No module named 'no_such_module'", 1),
        (HOOK, ["train.py"], "ValueError: bad", 1),
        ("def f():\n    raise ValueError('bad')\nf()\n", ["train.py"], "ValueError: bad", 2),
        ("", ["-m", "math"], "ImportError: math has no Python code to run.", 0),
    ],
)
def test_an_error_anywhere_is_left_for_the_launcher_and_not_printed(code, script, words, num_frames, home):
    (home / "train.py").write_text(code)
    done = run(*RANK_STARTER, *script, file=home / "error.json")
    assert (done.returncode, done.stderr) == (1, "")
    said = json.loads((home / "error.json").read_text())["message"]
    assert said["message"].startswith(words)
    assert said["extraInfo"]["py_callstack"].count("  File ") == num_frames
    assert run(*RANK_STARTER, *script).stderr.splitlines()[-1].startswith(words)  # without a launcher it is printed


def test_an_error_before_another_attempt_is_printed_too(home):
    (home / "train.py").write_text("raise ValueError('bad')\n")
    with environ.patched({"TORCHELASTIC_MAX_RESTARTS": "1", "TORCHELASTIC_RESTART_COUNT": "0"}):
        assert "ValueError: bad" in run(*RANK_STARTER, "train.py", file=home / "error.json").stderr


@pytest.mark.parametrize(("said", "code"), [("3", 3), ("'words'", 1), ("0", 0), ("", 0)])
def test_a_script_that_ends_itself_has_its_own_exit_code(said, code, home):
    (home / "train.py").write_text(f"import sys\nsys.exit({said})\n")
    done = run(*RANK_STARTER, "train.py", file=home / "error.json")
    assert done.returncode == code
    assert (home / "error.json").exists() == (code != 0)
    if code:
        left = json.loads((home / "error.json").read_text())["message"]
        assert left["message"] == f"It ended itself with exit code {code} ({home / 'train.py'}, line 2)."
        assert left["extraInfo"]["exit_code"] == code


def test_an_interrupt_is_not_printed_where_a_launcher_was_interrupted(home):
    (home / "train.py").write_text("raise KeyboardInterrupt\n")
    done = run(*RANK_STARTER, "train.py", file=home / "error.json")
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")
    assert "KeyboardInterrupt" in run(*RANK_STARTER, "train.py").stderr
