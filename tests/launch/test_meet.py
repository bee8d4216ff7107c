# SPDX-License-Identifier: Apache-2.0
"""Two machines that have no way to each other train together through a bucket on a third one."""

import json

import pytest

from tests.launch.machines import ADDRESSES, SERVER, Apart, two_machines
from tests.s3_server import BUCKET, NAMESPACE, s3_server, variables_for

TRAINS = """
import json, sys, torch
from farflung import Accelerator
torch.set_num_threads(1)
accelerator, model = Accelerator(), torch.nn.Linear(300, 100)
torch.seed()
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
for _ in range(120):
    accelerator.backward(model(torch.randn(8, 300)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
stats = accelerator.outer_loops[0].stats()
accelerator.end_training()
total = sum(float(one.double().sum()) for one in model.parameters())
print("RESULT", json.dumps([total, stats.rounds, stats.replicas_lost]))
"""
REACHES = "import socket; socket.create_connection((%r, 22), 2)"

pytestmark = [pytest.mark.namespace, pytest.mark.timeout(240)]


@pytest.mark.usefixtures("warm", "either_key")
@pytest.mark.parametrize("bucket", [f"s3://{BUCKET}", f"hf://{NAMESPACE}/{BUCKET}"])
def test_two_machines_without_a_way_to_each_other_train_through_a_bucket(bucket, home):
    (home / "train.py").write_text(TRAINS)
    machines = Apart(megabits=20.0)
    outer = ["--outer", "streaming_diloco", "--outer-every", "20", "--outer-fragments", "1", "--heartbeat_s", "1"]
    where = ["--elastic", "2:2", "--replicas", "1", "--meet", f"{bucket}/run"]
    line = ["farflung", "launch", "--cpu", *where, *outer]
    with two_machines(machines):
        for machine, other in ((0, SERVER.format(1)), (1, SERVER.format(0)), (0, ADDRESSES[1])):
            assert "unreachable" in machines.start(machine, ["python", "-c", REACHES % other], home).communicate()[0]
        with s3_server("0.0.0.0", ("ip", "netns", "exec", machines.spaces[2])) as port:
            there = [variables_for(f"http://{SERVER.format(machine)}:{port}") for machine in range(2)]
            running = [machines.start(number, [*line, "train.py"], home, there[number]) for number in range(2)]
            texts = [one.communicate()[0] for one in running]
    found = [line.removeprefix("RESULT ") for text in texts for line in text.splitlines() if line.startswith("RESULT")]
    assert len(found) == 2, texts
    (one, rounds, lost), other = map(json.loads, found)
    assert [one, rounds, lost] == other
    assert (rounds >= 5, lost) == (True, 0)
