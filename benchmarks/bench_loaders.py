# SPDX-License-Identifier: Apache-2.0
"""What does a batch cost? A raw DataLoader, ours and Accelerate's: sharded, dispatched, and a stream in one process.

python benchmarks/bench_loaders.py [--batches 100] [--batch-size 128] [--tokens 128] [--rounds 30] [--write]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from _measure import interleave, medians_us, report, seeded
from torch.utils.data import DataLoader, IterableDataset

from farflung.comm.exchange import Exchange
from farflung.comm.group import SoloGroup
from farflung.comm.torch_group import TorchGroup
from farflung.config.handlers import DataLoaderConfiguration
from farflung.data.prepare import prepare_loader
from farflung.loop.state import LoopState
from farflung.testing.ranks import run_ranks

SEED = 0
RANKS = 2


class Stream(IterableDataset[float]):
    """Numbers, so that reading them costs next to nothing."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[float]:
        return map(float, range(self.n))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=100, help="in one pass, on each rank")
    parser.add_argument("--batch-size", type=int, default=128, help="of the sharded and dispatched loaders")
    parser.add_argument("--tokens", type=int, default=128, help="in a sample, which has a mask and a label too")
    parser.add_argument("--rounds", type=int, default=30, help="passes of each loader")
    parser.add_argument("--write", action="store_true", help="append the line to results/loaders.jsonl")
    chosen = parser.parse_args()
    shape = chosen.batches, chosen.batch_size, chosen.tokens, chosen.rounds
    times: dict[str, float] = {}
    for dispatch in (False, True):
        times |= run_ranks(measure_shared, RANKS, *shape, dispatch, timeout_s=300)[0]
    times |= run_ranks(measure_stream, 1, chosen.batches, chosen.rounds, timeout_s=300)[0]
    report(
        "What does a batch cost?",
        {
            "median_us_per_batch": times,
            "over_raw": {
                f"{who} {kind}": round(times[f"{who} {kind}"] / times[f"raw {kind}"], 2)
                for kind in ("sharded", "dispatched", "stream")
                for who in ("farflung", "accelerate")
            },
        },
        seed=SEED,
        write_to="loaders.jsonl" if chosen.write else None,
        ranks=RANKS,
        batch=f"dict of two int64 [{chosen.batch_size}, {chosen.tokens}] and one [{chosen.batch_size}]",
        stream_batch="fp64 [8]",
        accelerate=accelerate.__version__,
    )


def measure_shared(batches: int, batch_size: int, tokens: int, rounds: int, dispatch: bool) -> dict[str, float]:
    """Time a pass of each loader on every rank, in step. The raw one holds just what this rank gets when sharded."""
    seeded(SEED)
    group = TorchGroup()
    samples = [
        {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": k}
        for k, ids in enumerate(torch.randint(0, 256, (RANKS * batches * batch_size, tokens)))
    ]
    own = [sample for k, sample in enumerate(samples) if k // batch_size % RANKS == group.rank]
    ours, theirs = both(DataLoader(samples, batch_size), group, dispatch)
    kind = "dispatched" if dispatch else "sharded"
    contestants = {f"raw {kind}": DataLoader(own, batch_size), f"farflung {kind}": ours, f"accelerate {kind}": theirs}
    return per_batch(contestants, batches, rounds)


def measure_stream(batches: int, rounds: int) -> dict[str, float]:
    """Time a pass of each loader over a stream, in one process."""
    raw = DataLoader(Stream(8 * batches), 8)
    dist.destroy_process_group()
    ours, theirs = both(raw, SoloGroup(), None)
    return per_batch({"raw stream": raw, "farflung stream": ours, "accelerate stream": theirs}, batches, rounds)


def both(raw: DataLoader[Any], group: Any, dispatch: bool | None) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Prepare a loader twice: by us, and by Accelerate."""
    peer = accelerate.Accelerator(
        cpu=True, dataloader_config=accelerate.DataLoaderConfiguration(dispatch_batches=dispatch)
    )
    assert peer.num_processes == group.size, "Accelerate did not join the group"
    ours = prepare_loader(
        raw,
        exchange=Exchange(group),
        device=torch.device("cpu"),
        state=LoopState(),
        config=DataLoaderConfiguration(dispatch_batches=dispatch),
        rng_types=["generator"],
    )
    return ours, peer.prepare(raw)


def per_batch(loaders: dict[str, DataLoader[Any]], batches: int, rounds: int) -> dict[str, float]:
    """Return microseconds a batch by name; all loaders must have the same number of batches."""
    passes: dict[str, Callable[[], int]] = {name: partial(count, loader) for name, loader in loaders.items()}
    assert {one_pass() for one_pass in passes.values()} == {batches}
    barrier = dist.barrier if dist.is_initialized() else None
    times = medians_us(interleave(passes, rounds=rounds, warmup=2, before=barrier))
    return {name: round(times[name] / batches, 2) for name in passes}


def count(loader: DataLoader[Any]) -> int:
    """Iterate over a loader once and count its batches."""
    return sum(1 for _ in loader)


if __name__ == "__main__":
    main()
