# SPDX-License-Identifier: Apache-2.0
"""transformers' models that are cut by their own plan for tensor parallelism, through an Accelerator."""

from importlib import import_module

import pytest

import farflung
from farflung.testing.ranks import run_ranks
from tests.outer.replicas import same

pytestmark = [pytest.mark.package("transformers"), pytest.mark.long]


def program(*arguments):
    farflung.install_as_accelerate()
    return import_module("tests.integrations.tensor_parallel").main(*arguments)  # it imports transformers: there alone


def test_models_cut_by_their_own_plans_train_and_resume_as_on_one_process(tmp_path):
    (alone,) = run_ranks(program, 1, "one", tmp_path, timeout_s=120)
    cut = run_ranks(program, 2, "two", tmp_path, timeout_s=120)
    (loaded,) = run_ranks(program, 1, "three", tmp_path, "two", timeout_s=120)
    for kind, wanted in alone.items():
        for rank in cut:
            seen = rank[kind]
            assert seen["num_cut"] > 0
            assert seen["losses"] == pytest.approx(wanted["losses"], rel=1e-12)
            assert seen["norms"] == pytest.approx(wanted["norms"], rel=1e-12)
            assert seen["resumed"] == seen["losses"][3:]
        first = cut[0][kind]
        assert same(first["saved"], first["exported"], loaded[kind]["loaded"])
