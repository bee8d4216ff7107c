# SPDX-License-Identifier: Apache-2.0
"""Codecs by the names that flags, files and scripts have for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

from farflung.base.checks import check_protocol, check_word
from farflung.codec.base import Cast, Codec, Identity
from farflung.codec.blockwise import E3M0, Fp8, Int4, Int8
from farflung.codec.sparse import TopK

CODECS: Mapping[str, Callable[[], Codec]] = {
    "none": Identity,
    "bf16": lambda: Cast("bf16"),
    "fp16": lambda: Cast("fp16"),
    "int8": Int8,
    "int4": Int4,
    "fp8": Fp8,
    "e3m0": E3M0,
    "topk": TopK,
}


def codec_of(codec: Codec | str | None, usual: str | None = None) -> Codec:
    """Return `codec`, the one of this name, or for None the one that `usual` names; ConfigError if there is none."""
    if codec is None and usual is not None:
        codec = usual
    if isinstance(codec, str):
        check_word("codec", codec, CODECS)
        return CODECS[codec]()
    name = codec.__name__ if isinstance(codec, type) else "Int8"
    wanted = f"a codec, such as {name}(), or the name of one: {', '.join(CODECS)}"
    check_protocol("codec", codec, ("encode", "decode", "wire_bytes", "linear"), wanted)
    return cast(Codec, codec)
