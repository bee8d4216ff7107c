# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels write the bits of the torch version: in Triton's interpreter, which needs no GPU, and on one.

The interpreter is for a whole process, so this file is also the program that runs in it.
"""

from __future__ import annotations

import math
import os
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

from farflung.codec import blockwise
from farflung.codec.blockwise import E3M0, Fp8, Int4, Int8
from tests.python import run_python

ROOT = Path(__file__).parent.parent.parent
# Triton compiles for them without a GPU, CUDA or ROCm: their names there, what comes out, and a line of it. On AMD's
# devices Farflung takes torch's version until the kernels have run on one.
TARGETS = {
    "sm_80": (("cuda", 80, 32), "ptx", ".target sm_80"),
    "sm_90": (("cuda", 90, 32), "ptx", ".target sm_90"),
    "gfx942": (("hip", "gfx942", 64), "amdgcn", '.amdgcn_target "amdgcn-amd-amdhsa--gfx942"'),
}
CODECS = [Int8(), Int8(block=8), Fp8(), Fp8(block=16), Int4(), Int4(block=4), E3M0(), E3M0(block=8)]


def values(block: int) -> Tensor:
    """Blocks of many magnitudes, of zeros, of subnormal and huge numbers and of ties, and a shorter last one."""
    make = torch.Generator().manual_seed(block)
    rows = torch.randn(10, block, generator=make)
    rows[1] *= 2.0 ** torch.randint(-140, 120, (block,), generator=make)
    rows[2] = 0
    rows[3] *= 1e-42
    rows[4] = rows[4].sign() * torch.finfo(torch.bfloat16).max
    rows[5] *= torch.rand(block, generator=make) < 0.1
    for row, top in enumerate((14, 128, 254, 448), 6):  # whole numbers that lie between two levels of some codec
        rows[row] = torch.randint(-top, top + 1, (block,), generator=make)
        rows[row, ::3] = top
    powers = torch.cat([sign * factor * 2.0 ** -torch.arange(12.0) for sign in (1, -1) for factor in (1, 0.75)])
    return torch.cat([rows.flatten(), powers, torch.randn(block // 2 + 1, generator=make)])


def computed(codec, x, kernels):
    """The wire of `x`, and what it is decoded and added to, by kernels or by torch alone."""
    into = torch.linspace(-1, 1, x.numel(), device=x.device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blockwise, "kernels", lambda x, block: kernels)
        wire = codec.encode(x)
        out = codec.decode(wire, torch.full_like(x, math.nan))
        return wire, out, *(codec.add(wire, into.clone(), factor) for factor in (1, 0.3))


def check_bits(codec, x, kernels):
    """Wires are compared byte for byte, values bit for bit but for the sign of a zero."""
    assert all(map(torch.equal, computed(codec, x, kernels), computed(codec, x, None))), codec


def check_nan(codec, kernels):
    """What is not finite stays in its block."""
    x = torch.linspace(-1, 1, 3 * codec.block)
    x[codec.block] = math.nan
    out = computed(codec, x, kernels)[1]
    assert (~out.isfinite()).view(3, -1).tolist() == [[block == 1] * codec.block for block in range(3)], codec


@pytest.mark.long
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_the_kernels_write_the_bits_of_the_torch_version():
    done = run_python("-m", __name__, cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"})
    assert done.stdout.split() == ["checked", str(len(CODECS))]


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("is_float", [False, True])
def test_the_kernels_compile_for_gpus_that_are_not_here(target, bits, is_float):
    compiler, kernels = import_module("triton.compiler"), import_module("farflung.codec.kernels")
    (backend, arch, warp), assembly, first_line = TARGETS[target]
    gpu = import_module("triton.backends.compiler").GPUTarget(backend, arch, warp)
    kinds = {"x": "*fp32", "scales": "*fp32", "codes": "*u8", "out": "*fp32", "unit": "fp32", "factor": "fp32"}
    kinds |= dict.fromkeys(("first", "end", "n"), "i32")
    given = {"ROWS": 16, "WHOLE": True, "BLOCK": 256, "BITS": bits, "FLOAT": is_float, "TOP": 7.0, "ADD": True}
    for kernel in (kernels._encode, kernels._decode):
        signature = {name: kinds.get(name, "constexpr") for name in kernel.arg_names}
        chosen = {name: given[name] for name in signature if name in given}
        compiled = compiler.compile(compiler.ASTSource(kernel, signature, chosen), target=gpu)
        assert first_line in compiled.asm[assembly]


def test_kernels_are_for_cuda_and_blocks_of_a_power_of_two():
    assert blockwise.kernels(torch.zeros(4), 128) is None
    assert blockwise.kernels(torch.zeros(4, device="meta"), 128) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_triton_writes_the_bits_that_the_cpu_writes(codec):
    kernels = blockwise.kernels(torch.zeros(1, device="cuda"), codec.block)
    for x in (torch.randn(1), values(codec.block), torch.randn(100_001) * 1e-3):
        assert torch.equal(codec.encode(x.cuda()).cpu(), codec.encode(x))
        check_bits(codec, x.cuda(), kernels)


if __name__ == "__main__":
    interpreted = import_module("farflung.codec.kernels")
    for each in CODECS:
        check_bits(each, torch.ones(1), interpreted)
        check_bits(each, values(each.block), interpreted)
        check_nan(each, interpreted)
    print("checked", len(CODECS))
