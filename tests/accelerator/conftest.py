# SPDX-License-Identifier: Apache-2.0
"""Tests whose body runs on ranks, and where checkpoints and temporary folders are."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from farflung.base.checks import Address
from farflung.testing.ranks import run_ranks
from tests.s3_server import S3Server


def on_ranks(
    num_ranks: int | None = None, each: Any = None, by_rank: Sequence[Any] | None = None, **options: Any
) -> Callable:
    """Make a test of what each of some ranks does, with the fixtures and parameters that it names.

    Args:
        num_ranks: None: the test's parameter of this name says it, and a rank that is alone joins no group.
        each: what it must return on every rank.
        by_rank: or what it must return on each of them.
        options: those of `run_ranks`.
    """

    def decorate(act: Callable[..., Any]) -> Callable[..., None]:
        @wraps(act)
        def test(**given: Any) -> None:
            size = num_ranks or given["num_ranks"]
            found = run_ranks(act, size, *given.values(), **{"connect": bool(num_ranks) or size > 1} | options)
            assert found == (by_rank or [each] * size)

        act.__qualname__ += ".__wrapped__"  # by which ranks find it
        return test

    return decorate


@pytest.fixture(params=["s3", "hf"])
def place(request: pytest.FixtureRequest, bucket: str, s3: S3Server) -> Address:
    """An address of each kind."""
    return Address(bucket if request.param == "s3" else s3.hub_address())


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders are."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    return tmp_path / "scratch"
