# SPDX-License-Identifier: Apache-2.0
"""What four ranks put on the network is what the cost model says, read at the interface: each recipe, and FSDP.

A network namespace of its own has a loopback interface over which nothing goes but what these ranks send.
"""

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.layout_cost import ModelSize, RankLayout, estimate
from farflung.cost.model import Workload, cost_of, hops
from farflung.cost.recipes import method_of
from farflung.outer import OuterLoop
from farflung.testing.patience import patience
from farflung.testing.ranks import run_ranks
from tests.recipes import made

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
RANKS, ROUNDS, LAYERS, WIDTH = 4, 2, 4, 512
BUCKET_BYTES = 2**20
# What travels beside the values: headers, acknowledgements, gloo's notes, ballots. For each message at most so much.
OVERHEAD_BYTES_A_MESSAGE = 1000

NAMES = ("local_sgd", "hierarchical", "diloco", "streaming_diloco", "eager_diloco", "sparse_loco", "edit", "gossip")
RECIPES = {name: made(name) for name in NAMES} | {
    "post_local_sgd": made("post_local_sgd", warmup=0),
    "diloco int8": made("diloco", codec="int8"),
    "diloco e3m0": made("diloco", codec="e3m0"),
}


def sent_so_far():
    """Bytes that went over loopback. (What lies in /sys belongs to the namespace in which that was mounted.)"""
    line = next(line for line in Path("/proc/self/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


def sent_by_all():
    """The same, when all ranks have come here, and before any goes on."""
    dist.barrier()
    so_far = sent_so_far()
    dist.barrier()
    return so_far


def model():
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])


def on_the_wire(name):
    """Bytes of all ranks at the interface in ROUNDS rounds of a recipe."""
    recipe, net = RECIPES[name], model()
    method = method_of(recipe, LAYERS * WIDTH**2, name=name, bucket_bytes=BUCKET_BYTES)
    outer = OuterLoop(net, recipe, bucket_bytes=BUCKET_BYTES)
    before = sent_by_all()
    for _ in range(ROUNDS * method.every + (method.delay if method.delay < method.every else 0)):
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(torch.rand_like(parameter), alpha=1e-3)
        outer.step()
    outer.state_dict()  # waits for what is under way
    after = sent_by_all()
    outer.close()
    return after - before


def on_the_wire_of_a_row():
    """Bytes of all ranks at the interface in one step of FSDP."""
    net, mesh = model(), init_device_mesh("cpu", (RANKS,))
    for module in (*net, net):
        fully_shard(module, mesh=mesh)
    x = torch.rand(1, WIDTH)
    net(x).sum().backward()
    before = sent_by_all()
    net(x).sum().backward()
    return sent_by_all() - before


def measure():
    torch.manual_seed(dist.get_rank())
    return {name: on_the_wire(name) for name in RECIPES} | {"FSDP": on_the_wire_of_a_row()}


def main():
    print(json.dumps(run_ranks(measure, RANKS)))


@pytest.fixture(scope="module")
def measured():
    """What each rank found, in a namespace where nobody else sends."""
    into = ["unshare", "--net", "--map-root-user"]
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("no network namespaces here")
    if subprocess.run([*into, "ip", "link", "set", "lo", "up"], capture_output=True).returncode:
        pytest.skip("this user may make no network namespace")
    program = f"ip link set lo up && exec {sys.executable} -c 'from tests.outer.test_wire import main; main()'"
    ended = subprocess.run([*into, "sh", "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=patience(90))
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.law("forecast-is-sent")
@pytest.mark.parametrize("name", RECIPES)
def test_bytes_at_the_interface_are_those_of_the_cost_model(measured, name):
    method = method_of(RECIPES[name], LAYERS * WIDTH**2, name=name, bucket_bytes=BUCKET_BYTES)
    run = Workload(LAYERS * WIDTH**2, LAYERS, 1.0, replicas=RANKS, bandwidth_bps=1e9)
    forecast = ROUNDS * RANKS * cost_of(run, method).bytes_sent_per_round
    buckets = math.ceil(4 * run.parameters / method.fragments / BUCKET_BYTES)
    meetings = 2 * (RANKS - 1)  # a vote, and the word that all has arrived
    rounds = method.fragments + sum(method.every // every - 1 for every, _ in method.levels)
    messages = ROUNDS * RANKS * rounds * (buckets * hops(method.exchange, RANKS) + meetings)
    seen = max(rank[name] for rank in measured)
    assert forecast <= seen <= 1.01 * forecast + messages * OVERHEAD_BYTES_A_MESSAGE


@pytest.mark.law("forecast-is-sent")
def test_bytes_at_the_interface_are_those_of_the_estimate_of_a_row(measured):
    layout = RankLayout(1, RANKS, sharded=True, gloo=True)
    forecast = RANKS * estimate(ModelSize((0, *[WIDTH**2] * LAYERS)), layout).row_bytes
    messages = RANKS * LAYERS * (2 * hops("gathered", RANKS) + hops("reduced", RANKS))
    seen = max(rank["FSDP"] for rank in measured)
    assert forecast <= seen <= 1.01 * forecast + messages * OVERHEAD_BYTES_A_MESSAGE
