# SPDX-License-Identifier: Apache-2.0
"""How few bytes does a reader need that follows a run by differences, and how late is it?

14M weights move by AdamW on random gradients, from N(0, 0.02), at a rate of fine-tuning or of pretraining. Each version
is the weights after some more steps. `times_fewer` is how often the median difference goes into the whole weights in
the same dtype, `changed` the share of values in it (all of a piece, if more than half have changed), `encode_s` and
`apply_s` the medians of the first member's and of the reader's work on it, by one thread. The reader's bits are
compared with the weights of each version; `peak_mb` is how far the memory of the first member's process grows as it
encodes one, in addition to the weights before it.

`lag` writes states to an S3 server of another process on this machine, as a run does, with a reader of each kind in
turn: seconds from when a state begins to be written until the reader has the version, and MB read for it.

python benchmarks/bench_reader.py [--versions 1000] [--write]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from _measure import peak_bytes, report, seeded
from torch import Tensor

from farflung.address.difference import DTYPES, ReferenceWeights, weights_in
from farflung.address.reader import Reader
from farflung.address.saved_state import Saved, SavedStates
from farflung.address.schemes import objects_at
from farflung.config import environ
from farflung.members.differences import DifferenceWriter

sys.path.append(str(Path(__file__).parents[1]))
from tests.s3_server import BUCKET, s3_server

SEED, SIZE, SCALE = 0, 14_000_000, 0.02
RATES = (1e-6, 1e-5, 1e-3)
ROUND, FIVE = 8, 160  # steps of a version: of one short round, and of the five that a state is written after by default
FEW, LAGS = 10, 8  # versions


def parts(weights: Tensor) -> dict[str, Any]:
    """A state's parts with these weights and a momentum, as those of a run."""
    rows = [("weight", "float32", [len(weights)], [0], [len(weights)])]
    optimizer = {"param_groups": [{"look_ahead": 0.0}], "state": {0: {"momentum_buffer": torch.zeros_like(weights)}}}
    agreed = {"chunks": [weights], "optimizer": optimizer}
    return {"place": {}, "0": {"names": {"parameters": rows}, "agreed": {"parameters": agreed}}}


def trained(rate: float, steps: int) -> Iterator[Tensor]:
    """Yield the weights after every so many steps."""
    seeded(SEED)
    weights = torch.nn.Parameter(torch.randn(SIZE) * SCALE)
    optimizer, noise = torch.optim.AdamW([weights], lr=rate, fused=True), torch.randn(2 * SIZE)
    while True:
        for _ in range(steps):
            start = int(torch.randint(SIZE, ()))
            weights.grad = noise[start : start + SIZE]
            optimizer.step()
        yield weights.detach()


def chain(rate: float, steps: int, versions: int, dtype: str) -> dict[str, Any]:
    """Follow the weights by differences."""
    kind, coming = DTYPES[dtype], trained(rate, steps)
    for _ in range(2 * ROUND // steps + 1):  # until the moments have settled
        first = next(coming)
    writer, reader = (ReferenceWeights.of("0", kind, weights_in(parts(first), kind)) for _ in range(2))
    rows: dict[str, list[float]] = {"bytes": [], "changed": [], "encode_s": [], "apply_s": []}
    peak = 0.0
    for number in range(1, versions + 1):
        state, found = parts(next(coming)), list[Any]()

        def encode(state: Any = state, name: str = str(number), found: list[Any] = found) -> None:
            found.append(writer.advance(name, weights_in(state, kind)))

        start = time.perf_counter()
        if number == versions:
            peak = peak_bytes(encode) / 1e6
        else:
            encode()
        rows["encode_s"].append(time.perf_counter() - start)
        pieces = found[0]["pieces"]
        rows["bytes"].append(sum(one["data"].nbytes for one in pieces))
        rows["changed"].append(sum(one["changed"] for one in pieces) / SIZE)
        start = time.perf_counter()
        reader.apply(str(number), found[0])
        rows["apply_s"].append(time.perf_counter() - start)
        ((_, values),) = reader.pairs()
        assert torch.equal(values, state["0"]["agreed"]["parameters"]["chunks"][0].to(kind)), number
    medians = {name: statistics.median(values) for name, values in rows.items()}
    times = round(SIZE * kind.itemsize / medians["bytes"], 2)
    figures = {name: round(medians[name], 3) for name in ("changed", "encode_s", "apply_s")}
    return {"times_fewer": times, "kilobytes": round(medians["bytes"] / 1e3), "peak_mb": round(peak), **figures}


def lag(rate: float, dtype: str | None, versions: int) -> dict[str, Any]:
    """Follow a run that writes states to a bucket."""
    written: dict[int, float] = {}
    coming = trained(rate, ROUND)
    found: list[tuple[float, int]] = []
    with s3_server() as server:
        environ.export(server.variables)
        address = f"s3://{BUCKET}/run"
        states = SavedStates(objects_at(address).part("loop1"))
        differences, goes_on = DifferenceWriter(states), threading.Semaphore(1)

        def write() -> None:
            for number in range(1, versions + 1):
                goes_on.acquire()
                state, name = parts(next(coming).clone()), f"1.{number}.bench"
                written[number] = time.monotonic()
                more = differences.to(name, state, differences.wanted)
                states.write(name, 0, {**state, **more})
                chains, is_last = differences.chains(), number == versions
                states.finish(Saved(name, number, 1, tuple(state), chains=chains, is_last=is_last))
                time.sleep(1.0)  # in which the reader leaves its note
                differences.look()

        thread = threading.Thread(target=write)
        thread.start()
        reader: Callable[[], Iterator[Any]] = Reader(address, dtype=None if dtype is None else DTYPES[dtype]).__iter__
        while not written or states._log.last()[1] is None:
            time.sleep(0.1)
        for version in reader():
            found.append((time.monotonic() - written[version.step], version.num_bytes))
            goes_on.release()
        thread.join()
    seconds, num_bytes = zip(*found[3:], strict=True)  # the first three are whole
    return {"lag_s": round(statistics.median(seconds), 2), "mb": round(statistics.median(num_bytes) / 1e6, 2)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--versions", type=int, default=1000)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    write_to = "reader.jsonl" if args.write else None
    for rate in RATES:
        for dtype in (None, "bfloat16", "float32"):
            figures = lag(rate, dtype, LAGS)
            report("reader_lag", figures, seed=SEED, write_to=write_to, rate=rate, dtype=dtype, versions=LAGS)
    contestants = [(ROUND, "bfloat16", args.versions), (ROUND, "float32", FEW)]
    contestants += [(FIVE, "bfloat16", FEW), (FIVE, "float32", FEW)]
    for steps, dtype, versions in reversed(contestants):
        for rate in RATES:
            figures, which = chain(rate, steps, versions, dtype), {"rate": rate, "steps": steps, "dtype": dtype}
            report("reader", figures, seed=SEED, write_to=write_to, versions=versions, **which)


if __name__ == "__main__":
    main()
