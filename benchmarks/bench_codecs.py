# SPDX-License-Identifier: Apache-2.0
"""What does a codec cost, next to the time on the wire that it saves against fp32?

python benchmarks/bench_codecs.py [--values 1048576] [--threads 2] [--replicas 2] [--rounds 30] [--device cpu] [--write]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from _measure import interleave, medians_us, report, seeded

from farflung.codec.base import Cast, Codec
from farflung.codec.blockwise import E3M0, Fp8, Int4, Int8
from farflung.codec.feedback import ErrorFeedback
from farflung.codec.sparse import TopK

SEED = 0
CODECS: list[Codec] = [Cast("bf16"), Int8(), Fp8(), Int4(), E3M0(), TopK(), ErrorFeedback(TopK(), beta=0.95)]
MBIT_S = (100, 1000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--values", type=int, default=1 << 20, help="in the bucket; 1048576 is one of the CPU's")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--replicas", type=int, default=2, help="wires that each replica sums; its own is one of them")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--write", action="store_true", help="append the line to results/codecs.jsonl")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    seeded(SEED)
    figures = measure(chosen.values, chosen.replicas, chosen.rounds, chosen.device)
    report(
        "What does a codec cost, next to the time on the wire that it saves against fp32?",
        figures,
        seed=SEED,
        write_to="codecs.jsonl" if chosen.write else None,
        values=chosen.values,
        threads=chosen.threads,
        replicas=chosen.replicas,
        device=chosen.device,
    )


def measure(n: int, replicas: int, rounds: int, device: str) -> dict[str, Any]:
    """Time each codec's parts, and a copy of the same bytes; a round is to encode, decode one wire, add the others."""
    x = torch.randn(n, device=device) * 1e-3
    out = torch.empty_like(x)
    turns: dict[str, Callable[[], Any]] = {"fp32 copy": waiting(lambda: out.copy_(x), device)}
    for codec in CODECS:
        turns |= {f"{codec} {name}": waiting(part, device) for name, part in parts(codec, x, out).items()}
    ns = {name: 1000 * us / n for name, us in medians_us(interleave(turns, rounds, warmup=3)).items()}
    figures: dict[str, Any] = {"fp32 copy": {"ns_per_value": round(ns["fp32 copy"], 3)}}
    for codec in CODECS:
        cost = ns[f"{codec} encode"] + ns[f"{codec} decode"] + (replicas - 1) * ns[f"{codec} add"]
        # Among M, an all-reduce of fp32 sends 8 (M - 1) / M bytes a value, a gather M - 1 wires.
        gathered = 1 if not codec.linear else 2 / replicas
        saved_bytes = (replicas - 1) * (8 / replicas - gathered * codec.wire_bytes(n) / n)
        figures[str(codec)] = {
            "bits_per_value": round(8 * codec.wire_bytes(n) / n, 3),
            "ns_per_value": {part: round(ns[f"{codec} {part}"], 3) for part in ("encode", "decode", "add")},
            "cost_over_saved": {f"{mbit} Mbit/s": round(cost * mbit / (8000 * saved_bytes), 4) for mbit in MBIT_S},
        }
    return figures


def parts(codec: Codec, x: torch.Tensor, out: torch.Tensor) -> dict[str, Callable[[], Any]]:
    wire = codec.encode(x)
    encode: Callable[[], Any] = lambda: codec.encode(x)  # noqa: E731
    if isinstance(codec, ErrorFeedback):
        work, residual = x.clone(), torch.zeros_like(x)
        encode = lambda: codec.encode_with(work, residual)  # noqa: E731  # what it leaves is coded next
    return {"encode": encode, "decode": lambda: codec.decode(wire, out), "add": lambda: codec.add(wire, out, 1.0)}


def waiting(call: Callable[[], Any], device: str) -> Callable[[], Any]:
    """Wait for the device, where calls return before their work is done."""
    if device == "cpu":
        return call

    def whole() -> None:
        call()
        torch.cuda.synchronize()

    return whole


if __name__ == "__main__":
    main()
