"""One replica of an elastic run: `python -m tests.outer.elastic_replica '{"port": ..., "member": ...}'`.

Replica i moves its weights by -(i + 1) in each step. It prints a line for each step and for each round.
"""

import json
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from farflung.outer import OuterLoop, diloco, streaming_diloco
from farflung.outer.elastic import Elastic

RECIPES = {
    "diloco": lambda: diloco(4, lr=0.5, momentum=0.5),
    "streaming": lambda: streaming_diloco(8, 2, delay=1, lr=0.5, momentum=0.5),
}


class Blocks(nn.Module):
    def __init__(self, numel):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(numel, 1, bias=False) for _ in range(2)])
        for parameter in self.parameters():
            nn.init.constant_(parameter, 64.0)


def main(port, member, index, steps=10**9, step_s=0.01, numel=8, recipe="diloco", bucket_bytes=None, **options):
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30))
    model = Blocks(numel)
    membership = Elastic(store, member, **options)
    said = {"member": member, "index": index}

    def say(**what):
        print(json.dumps(said | what | {"at": time.time()}), flush=True)

    def weight():
        return float(sum(parameter.detach().double().sum() for parameter in model.parameters()))

    with OuterLoop(model, RECIPES[recipe](), membership=membership, bucket_bytes=bucket_bytes) as outer:
        outer.listeners.append(
            lambda one: say(round=one.number, step=one.step, weights=one.weights, fragment=one.fragment)
        )
        say(joined=outer.position, ids=membership.record.ids, weight=weight())
        while outer.position < steps:
            time.sleep(step_s)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= index + 1
            outer.step()
            say(position=outer.position, weight=weight(), epoch=membership.record.number)
    say(end=outer.position, weight=weight())


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
