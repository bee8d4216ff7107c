# SPDX-License-Identifier: Apache-2.0
"""The words of settings are equal to their plain text; `tests/compat` has their names and values."""

from farflung.base import enums


def test_a_word_is_its_own_text_and_found_by_it():
    assert enums.DistributedType.NO == "NO"
    assert str(enums.PrecisionType.BF16) == f"{enums.PrecisionType.BF16}" == "bf16"
    assert "bf16" in enums.PrecisionType
    assert enums.PrecisionType.BF16 in enums.PrecisionType
    assert "bf61" not in enums.PrecisionType
    assert enums.PrecisionType("fp16") is enums.PrecisionType.FP16
    assert enums.PrecisionType.list() == ["no", "fp8", "fp16", "bf16"]
