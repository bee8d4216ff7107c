# SPDX-License-Identifier: Apache-2.0
"""A torch that is too old is refused at the first import, without being loaded, and pyproject.toml says the same."""

import re
from pathlib import Path

import pytest

from farflung.base.oldest_torch import OLDEST_TORCH, check_torch
from tests.python import run_python

OLDEST = ".".join(map(str, OLDEST_TORCH))


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Let a torch of a version be found first; it can't be loaded."""

    def write(version):
        (tmp_path / "torch").mkdir(exist_ok=True)
        (tmp_path / "torch" / "__init__.py").write_text("raise RuntimeError('torch was loaded')")
        (tmp_path / "torch" / "version.py").write_text(
            f"__all__ = ['__version__']\n__version__ = '{version}'\ncuda = None\n"
        )

    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return write


@pytest.mark.parametrize("start", [("-c", "import farflung.outer"), ("-m", "farflung", "--help")])
def test_an_older_torch_is_refused_in_one_line_with_what_to_do(install, start, tmp_path):
    install("2.9.1+cu128")
    last = run_python(*start, code=1).stderr.splitlines()[-1]
    assert last == (
        f"ImportError: Farflung needs torch {OLDEST} or newer, but torch 2.9.1+cu128 is installed in {tmp_path}/torch. "
        f"Run `pip install --upgrade 'torch>={OLDEST}'`."
    )
    for version in (f"{OLDEST}.0a0+git449b176", f"{OLDEST}.0+cpu", "3.0.0", "unknown"):
        install(version)
        run_python("-c", "import farflung")


def test_what_is_no_folder_of_files_is_not_judged(monkeypatch, tmp_path):
    (tmp_path / "version.py").write_text("__version__ = '1.0'\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("farflung.base.oldest_torch.find_spec", lambda _: None)
    check_torch()


def test_the_oldest_torch_stands_in_the_projects_files():
    root = Path(__file__).parents[2]
    for name, pattern in (
        ("pyproject.toml", r'"torch>=([\d.]+)"'),
        ("README.md", r"any torch from ([\d.]+) on"),
        ("Makefile", r"torch==([\d.]+)"),
        (".ci/run", r"torch==([\d.]+)"),
    ):
        assert re.findall(pattern, (root / name).read_text(encoding="utf-8")) == [OLDEST], name
