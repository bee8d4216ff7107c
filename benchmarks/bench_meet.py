# SPDX-License-Identifier: Apache-2.0
"""How much of the time do replicas compute that meet in a bucket, and have no other way to each other?

Two machines made of namespaces, each with a line of 20 Mbit/s to a third one that serves S3 and forwards
nothing. The same steps are timed in turns: by replicas that send nothing, and by two that train together. Needs root.
With `--cores 0.8` each of the two has so much of a core in both turns (cgroups, version 1), and the server, which would
be elsewhere, what they leave.

`--recipe auto` chooses for the bucket, whose answers are late by `--request_ms`, or for a folder of this machine.

python benchmarks/bench_meet.py [--megabits 20] [--request_ms 0] [--folder] [--size small] [--steps 400] [--runs 3]
    [--codec int4] [--recipe streaming_diloco] [--every 32] [--cores 0.8] [--write]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from _measure import report

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.launch.machines import SERVER, Apart, two_machines
from tests.s3_server import BUCKET, s3_server, variables_for

LATE = """
import sys
from tests.s3_server import S3Server
S3Server(f"http://127.0.0.1:{sys.argv[1]}").set(late_s=float(sys.argv[2]))
"""
PERIOD_US = 10_000  # in which a machine has its share of a core
TRAINS = """
import hashlib, json, sys, time
import torch
from farflung.demo.gpt import GPT, loss_per_sequence
from farflung.demo.settings import SIZES
from farflung.demo.text import load_text
from farflung.elastic import launched_membership
from farflung.outer import OuterLoop
from farflung.auto.trial import RecipeTrial
from farflung.auto.tuner import LineTuner
from farflung.methods.arguments import OuterConfig
size, steps, recipe, options = sys.argv[1], int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
torch.set_num_threads(1)
shape = SIZES[size]
text = torch.frombuffer(bytearray(load_text(None).train), dtype=torch.uint8)
pieces = text.unfold(0, shape.context + 1, 1)
torch.manual_seed(0)
model = GPT(shape)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
membership = launched_membership()
outer = None
if membership is not None:
    tuner, config = LineTuner(), OuterConfig(recipe, steps=steps + steps // 4, **options)
    chooser = RecipeTrial(tuner) if recipe == "auto" else None
    outer = OuterLoop(model, config, inner=optimizer, membership=membership, chooser=chooser)
    if recipe == "auto":
        tuner.follow(outer)
    torch.manual_seed(membership.member)
for step in range(steps + steps // 4):
    if step == steps // 4:  # then all have met
        began, before = time.perf_counter(), outer.stats().as_dict() if outer else {}
    batch = pieces[torch.randint(len(pieces), (8,))]
    loss_per_sequence(model(batch[:, :-1]), batch[:, 1:]).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if outer:
        outer.step()
seconds, stats = time.perf_counter() - began, outer.stats().as_dict() if outer else {}
chosen = outer.state_dict().get("auto", "") if outer else ""
if outer:
    outer.close()
digest = hashlib.blake2b(b"".join(one.detach().numpy().tobytes() for one in model.parameters()), digest_size=8)
said = {name: stats[name] - before[name] for name in stats if isinstance(stats[name], (int, float))}
said["recipe"] = chosen
numel = sum(one.numel() for one in model.parameters())
print("RESULT", json.dumps({"seconds": seconds, "digest": digest.hexdigest(), "numel": numel, **said}), flush=True)
"""


def run(machines: Apart, folder: Path, port: str, address: str, chosen: argparse.Namespace) -> list[dict[str, Any]]:
    """Train on both machines, together if there is an address; return what each one has said."""
    (folder / "train.py").write_text(TRAINS)
    options = {"every": chosen.every, "codec": chosen.codec} if chosen.recipe != "auto" else {}
    script = ["train.py", chosen.size, str(chosen.steps), chosen.recipe, json.dumps(options)]
    screens = []
    for machine in range(2):
        variables: Mapping[str, str] = variables_for(f"http://{SERVER.format(machine)}:{port}")
        line = ["farflung", "launch", "--cpu", "--elastic", "2:2", "--replicas", "1", "--meet", address]
        command = [*line, *script] if address else ["python", *script]
        screens.append(machines.start(machine, command, folder, variables))
        if chosen.cores:
            group = Path(f"/sys/fs/cgroup/cpu/farflung-machine{machine}")
            group.mkdir(exist_ok=True)
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(round(chosen.cores * PERIOD_US)))
            (group / "cgroup.procs").write_text(str(screens[-1].pid))
    texts = [screen.communicate()[0] for screen in screens]
    said = [line for text in texts for line in text.splitlines() if line.startswith("RESULT")]
    assert len(said) == 2, texts
    return [json.loads(line.removeprefix("RESULT ")) for line in said]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabits", type=float, default=20)
    parser.add_argument("--request_ms", type=float, default=0, help="how late each answer of the bucket is")
    parser.add_argument("--folder", action="store_true", help="meet in a folder instead")
    parser.add_argument("--size", default="small")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--recipe", default="streaming_diloco")
    parser.add_argument("--codec", default=None)
    parser.add_argument("--every", type=int, default=32)
    parser.add_argument("--cores", type=float, help="of each machine [as many as there are]")
    parser.add_argument("--write", action="store_true")
    chosen = parser.parse_args()
    shares, rows = [], []
    machines = Apart(chosen.megabits)
    serving = s3_server("0.0.0.0", ("ip", "netns", "exec", machines.spaces[2]))
    with tempfile.TemporaryDirectory() as folder, two_machines(machines), serving as port:
        late = [sys.executable, "-c", LATE, port, str(chosen.request_ms / 1000)]
        subprocess.run(["ip", "netns", "exec", machines.spaces[2], *late], check=True, cwd=Path(__file__).parents[1])
        for number in range(chosen.runs):
            place = Path(folder).as_uri() if chosen.folder else f"s3://{BUCKET}"
            alone = run(machines, Path(folder), port, "", chosen)
            together = run(machines, Path(folder), port, f"{place}/run{number}", chosen)
            assert together[0]["digest"] == together[1]["digest"], "the replicas have different weights"
            shares.append(max(one["seconds"] for one in alone) / max(one["seconds"] for one in together))
            rows.append(together[0])
            print(f"{shares[-1]:.3f} {alone} {together}", flush=True)
    report(
        "what share of the throughput without an exchange do replicas have that meet in a bucket?",
        {
            "share": round(statistics.median(shares), 3),
            "least": round(min(shares), 3),
            "rounds": rows[0]["rounds"],
            "numel": rows[0]["numel"],
            "seconds": round(statistics.median(row["seconds"] for row in rows), 1),
            "MB sent in rounds": round(rows[0]["bytes_sent"] / 1e6, 2),
            "digests equal": True,
            "recipes": [row["recipe"] for row in rows],
        },
        seed=0,
        write_to="meet.jsonl" if chosen.write else None,
        **{key: value for key, value in vars(chosen).items() if key != "write"},
    )


if __name__ == "__main__":
    main()
