# SPDX-License-Identifier: Apache-2.0
"""Programs of Lightning, ignite, Keras and trl train as they are; they save and validate what all replicas have."""

import sys

import pytest

from farflung.testing.patience import patience


@pytest.fixture
def runner(benchmark):
    return benchmark("frameworks.run")


def rows():
    for package, program, mode in (
        ("lightning", "lightning", "outer"),
        ("lightning", "lightning", "elastic"),
        ("lightning", "fabric", "elastic"),
        ("lightning", "lightning-gan", "outer"),
        ("lightning", "lightning-resumed", "outer"),
        ("lightning", "fabric", "outer"),
        ("ignite", "ignite", "outer"),
        ("keras", "keras", "elastic"),
        ("trl", "trl-sft", "as-accelerate"),
        ("trl", "trl-sft", "elastic"),
        ("trl", "trl-dpo", "as-accelerate"),
    ):
        yield pytest.param(program, mode, marks=pytest.mark.package(package), id=f"{program}-{mode}")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("program", "mode"), list(rows()))
def test_replicas_end_equal_with_what_was_validated_and_saved(runner, program, mode):
    code, ranks, text = runner.launched(sys.executable, program, mode, patience(200))
    assert runner.verdict(code, ranks, text, None) == "right", text
    assert ("over 2 replicas of a DDP model" in text) == (not program.startswith("trl"))  # on an Accelerator


@pytest.mark.package("keras")
def test_a_fit_of_keras_that_nothing_averages_is_refused(runner):
    code, ranks, text = runner.launched(sys.executable, "keras-fit", "outer", patience(200))
    assert runner.verdict(code, ranks, text, None).startswith("refused: --outer diloco did nothing"), text
