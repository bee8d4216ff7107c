# SPDX-License-Identifier: Apache-2.0
"""The words of settings are Accelerate's: same names, same values, equal to their plain text."""

import pytest
from accelerate.utils import dataclasses as accelerate

from farflung.base import enums

SHARED = ["DistributedType", "PrecisionType", "RNGType", "LoggerType", "DDPCommunicationHookType", "DynamoBackend"]


@pytest.mark.parametrize("name", SHARED)
def test_members_and_values_are_accelerate_s(name):
    theirs = {member.name: member.value for member in getattr(accelerate, name)}
    ours = {member.name: member.value for member in getattr(enums, name)}
    assert ours == theirs


def test_a_word_is_its_own_text_and_found_by_it():
    assert enums.DistributedType.NO == "NO"
    assert str(enums.PrecisionType.BF16) == f"{enums.PrecisionType.BF16}" == "bf16"
    assert "bf16" in enums.PrecisionType
    assert enums.PrecisionType.BF16 in enums.PrecisionType
    assert "bf61" not in enums.PrecisionType
    assert enums.PrecisionType("fp16") is enums.PrecisionType.FP16
    assert enums.PrecisionType.list() == ["no", "fp8", "fp16", "bf16"]
