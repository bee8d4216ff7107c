# SPDX-License-Identifier: Apache-2.0
"""What `make` installs, and in which order, as it says itself without doing it."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from farflung.testing.patience import patience

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="no make")


def steps(target, venv, *settings):
    command = ["make", "--dry-run", "--no-print-directory", target, f"VENV={venv}", *settings]
    # Without what a make around these tests tells the makes below it.
    outside = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    asked = {"cwd": ROOT, "env": outside, "capture_output": True, "text": True, "check": True}
    return subprocess.run(command, **asked, timeout=patience(60)).stdout


LAST = {"demo": "{}/bin/farflung demo", "test": "", "docs": "zensical build --clean --strict"}


@pytest.mark.parametrize(("target", "extra"), [("demo", "plot"), ("test", "test"), ("docs", "docs")])
def test_a_target_installs_what_it_needs_and_no_tools_for_developers(target, extra, tmp_path):
    said = steps(target, tmp_path / "venv")
    assert f"'.[{extra}]'" in said
    assert "dev]" not in said
    assert said.splitlines()[-1].endswith(LAST[target].format(tmp_path / "venv"))


@pytest.mark.parametrize("target", ["test-all", "check", "format", "release"])
def test_tools_for_developers_come_on_top(target, tmp_path):
    said = steps(target, tmp_path / "venv")
    assert said.index("'.[test]'") < said.index("'.[dev]'")


def test_nothing_is_installed_twice(tmp_path):
    for stamp in (".ready-torch", ".ready-demo", ".ready-test", ".ready-dev"):
        (tmp_path / stamp).touch()
    assert "pip install" not in steps("demo", tmp_path) + steps("test-all", tmp_path)


def test_torch_comes_from_the_index_that_is_asked_for(tmp_path):
    line = next(line for line in steps("demo", tmp_path / "v", "TORCH_INDEX=URL").splitlines() if "pip" in line)
    assert "--index-url URL torch" in line
    assert "--index-url" not in steps("demo", tmp_path / "v", "TORCH_INDEX=")


def test_each_step_says_what_it_does_and_how_long_it_takes_and_shows_its_progress(tmp_path):
    lines = steps("test-all", tmp_path / "v").splitlines()
    said = [line for line in lines if line.startswith('echo "==')]
    assert len(said) == 4
    assert all("minute" in line or "second" in line for line in said)
    assert not any("--quiet" in line for line in lines if "pip install" in line)


def test_each_package_has_its_exact_version():
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    names = [line.partition("==")[0] for line in pins if not line.startswith("#")]
    assert all("==" in line for line in pins if not line.startswith("#"))
    assert len(set(names)) == len(names)
    project = (ROOT / "pyproject.toml").read_text()
    declared = re.findall(r'^ *(?:\w+ = \[)?"([\w-]+)(?:\[\w+\])?[>=]=', project, re.MULTILINE)
    assert len(declared) > 30
    assert {name.lower() for name in declared} <= set(names)


def test_another_torch_has_an_environment_of_its_own_and_tests_that_exist(tmp_path):
    lines = steps("test-torch", tmp_path / "v", "TORCH=torch==1.0").splitlines()
    said = [line for line in lines if "python -m" in line]
    assert all(line.startswith(f"{tmp_path}/v-torch==1.0/bin/python -m ") for line in said)
    assert [" -m pip " in line for line in said] == [True, True, False]
    assert said[0].endswith(" 'torch==1.0'")
    assert not any("constraint" in line for line in said)
    tests = [word for word in said[-1].split() if word.startswith("tests/")]
    assert len(tests) > 5
    assert all((ROOT / test).exists() for test in tests)
