# SPDX-License-Identifier: Apache-2.0
"""All replicas of a run are killed at random moments and started again: its weights and its data are of one round.

Each row of the model moves by 1 whenever its sample is trained on, so the weights count the samples, in the share that
rounds give to each replica. Replicas report their steps and rounds, of which those count that a later start has kept.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter, defaultdict

import pytest
import torch
from torch.utils.data import DataLoader

from farflung import Accelerator
from farflung.address.saved_state import SavedStates
from farflung.address.schemes import transport_at
from farflung.config import environ
from farflung.methods.arguments import OuterConfig
from tests.outer.elastic_run import ElasticRun

SAMPLES, BATCH, EVERY, EPOCHS = 480, 4, 2, 3
STEP_S = 0.02  # so that the run does not end before the last kill
KILLS = int(os.environ.get("FARFLUNG_TEST_KILLS", "4"))


class Counts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = torch.nn.Parameter(torch.zeros(SAMPLES))

    def forward(self, batch):
        return -self.rows[batch].sum()


def count(pipe, place, folder, member, variables, step_s, *_):
    """Train a replica for some epochs, and report each step before it is made."""
    os.environ.update(variables)
    environ.export({"FARFLUNG_STORE": place[0], "FARFLUNG_MEMBER": str(member), "FARFLUNG_RUN_DIR": "none"})
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, outer=OuterConfig("diloco", every=EVERY, lr=1.0, momentum=0.0))
    model = Counts()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = DataLoader(torch.arange(SAMPLES), batch_size=BATCH, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    (loop,) = accelerator.outer_loops

    def say(**what):
        pipe.send({"member": member} | what)

    loop.listeners.append(lambda one: say(round=one.step, weights=dict(zip(one.members, one.weights, strict=True))))
    say(joined=loop.position)
    for _ in range(EPOCHS):
        for batch in loader:
            optimizer.zero_grad()
            accelerator.backward(model(batch))
            say(position=loop.position + 1, samples=batch.tolist())
            optimizer.step()
            time.sleep(step_s)
    accelerator.end_training()
    say(end=loop.position, rows=model.rows.detach().tolist())


def kept(said, starts):
    """Return how often each sample counted, and the model's rows, by what the members of all `starts` have said."""
    begun = [min(one["joined"] for one in said if one["member"] in members and "joined" in one) for members in starts]
    counts, rows = Counter(), torch.zeros(SAMPLES)
    for number, members in enumerate(starts):
        until = min(begun[number + 1 :], default=10**9)  # what came later was lost with all replicas
        steps, rounds = defaultdict(list), {}
        for one in said:
            if one["member"] in members and "samples" in one:
                steps[one["member"]].append((one["position"], one["samples"]))
            elif one["member"] in members and "round" in one and one["round"] <= until:
                rounds.setdefault(one["round"], one["weights"])
        for member, made in steps.items():
            before = -1
            for step, weights in sorted(rounds.items()):
                for sample in (one for at, samples in made if before < at <= step for one in samples):
                    counts[sample] += 1
                    rows[sample] += weights[member]
                before = step
    return counts, rows


@pytest.mark.long
@pytest.mark.law("a-run-outlives-its-members")
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("address", ["folder", "bucket", "hub"], indirect=True)
def test_each_sample_counts_though_all_are_killed_at_random_and_at_most_one_round_twice_a_restart(address, replicas):
    draw = random.Random(replicas)
    options = {"expected": replicas, "least": 1, "most": 4, "grace_s": 20.0, "state_every": 2}
    states = SavedStates(transport_at(address).board.part("loop1"))
    with ElasticRun(address=address, play=count, step_s=STEP_S) as run:
        run.board.put("run", json.dumps(options).encode())
        starts = []
        for number in range(KILLS + 1):
            starts.append([run.start(name) for name in range(replicas)])
            members = starts[-1]
            newest = next(states.newest(), None)
            run.until(lambda members=members: run.joined(*members), 60.0)
            (begun,) = {one["joined"] for one in run.said if one["member"] in members and "joined" in one}
            assert begun == (newest.position if newest else 0)
            if number == KILLS:
                break
            time.sleep(draw.uniform(0.0, STEP_S / 2 * SAMPLES * EPOCHS / BATCH / replicas / KILLS))
            run.kill(*members)
        run.until(lambda: run.has_ended(*starts[-1]), 120.0)
        run.until(lambda: sum("end" in one for one in list(run.said)) == replicas, 10.0)
        said = list(run.said)
    counts, rows = kept(said, starts)
    ends = [torch.tensor(one["rows"]) for one in said if "end" in one]
    assert all(torch.allclose(end, rows) for end in ends)
    times = Counter(counts[sample] for sample in range(SAMPLES))
    print(
        f"{replicas} at {address.partition(':')[0]}, {KILLS} kills, restarts at",
        [min(one["joined"] for one in said if one["member"] in members and "joined" in one) for members in starts],
        f"samples by how often they count: {dict(times)}",
    )
    assert min(times) >= EPOCHS
    extra = sum(counts.values()) - EPOCHS * SAMPLES  # of members that had not recorded a state's round in time
    assert extra <= (replicas > 1) * KILLS * EVERY * BATCH * replicas
