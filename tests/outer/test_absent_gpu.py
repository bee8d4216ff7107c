# SPDX-License-Identifier: Apache-2.0
"""On a GPU that is not here, every recipe learns what it learns on the CPU, and only rounds wait for the device.

Torch's fake tensors have no values, and an outer loop votes by values; nor can they take a backward pass without a
driver. These have values, so a run must end with the bits that it has on the CPU. A tensor of the host among those of
the device is an error, as on a GPU, and whatever makes the host wait for the device is noted.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from farflung.codec import blockwise
from farflung.comm.torch_group import TorchGroup
from farflung.outer import OuterLoop
from farflung.testing.ranks import run_ranks
from farflung.testing.sim import run_replicas
from tests.outer.replicas import RATE, net, train
from tests.recipes import RECIPES

CUDA = torch.device("cuda", 0)
WRITES = {"copy_", "_foreach_copy_", "__set__"}
COPIES = {*WRITES, "to", "cpu", "cuda", "numpy"}
READS = {"item", "tolist", "equal", "allclose", "nonzero", "masked_select", "unique", "numpy"}
READS |= {"__bool__", "__int__", "__float__", "__index__", "is_nonzero", "bincount", "argwhere", "__contains__"}


class Away(Tensor):
    """A tensor on the device. Its memory is the host's, which no operation is told."""

    device = CUDA
    is_cuda = True
    is_cpu = False

    def record_stream(self, stream: None) -> None:
        """Do nothing: there is one stream."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return run(function, args, kwargs or {}, [])


def is_place(value: Any) -> bool:
    """Whether an argument names a device."""
    return isinstance(value, torch.device) or (isinstance(value, str) and value.split(":")[0] in ("cpu", "cuda"))


def run(function: Callable[..., Any], args: Any, kwargs: dict[str, Any], waits: list[str]) -> Any:
    """Run an operation of torch; note it in `waits` if the host would wait for the device."""
    name = function.__name__
    given = tree_leaves((args, kwargs))
    tensors = [one for one in given if isinstance(one, Tensor)]
    away = [isinstance(one, Away) for one in tensors]
    places = [torch.device(one).type for one in given if is_place(one)]
    if name in WRITES:
        ends_away = bool(away) and away[0]
    elif name in ("cpu", "cuda") or places:
        ends_away = "cuda" in (name, *places)
    else:
        ends_away = any(away) and (name != "to" or away[-1])  # `to` takes another tensor's place
    if any(away) and (name in READS or (name in COPIES and not ends_away)):
        waits.append(name)
    if any(away) and name not in COPIES:
        odd = [one for one, is_away in zip(tensors, away, strict=True) if not is_away and one.dim() > 0]
        assert not odd, f"{name}: a tensor of the host, of shape {list(odd[0].shape)}, among those of the device"
    moves = name in ("to", "cpu", "cuda") and away[0] != ends_away
    args, kwargs = tree_map(lambda one: "cpu" if is_place(one) else one, (args, kwargs))
    if name == "cuda":
        function = Tensor.cpu
    with torch._C.DisableTorchFunctionSubclass():
        found = function(*args, **kwargs)
        found = found.clone() if moves and found is args[0] else found
    if ends_away:
        return tree_map_only(Tensor, lambda one: one if isinstance(one, Away) else one.as_subclass(Away), found)
    return tree_map_only(Away, lambda one: one.as_subclass(Tensor), found)


class AbsentGpu(TorchFunctionMode):
    """Makes what a thread creates on `cuda` lie on the device that is not here.

    Attributes:
        waits: the operations for which the host waited.
    """

    def __init__(self, stream: Any = None) -> None:
        super().__init__()
        self.waits: list[str] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return run(function, args, kwargs or {}, self.waits)

    def move(self, model: nn.Module) -> nn.Module:
        """Move a model to the device; `Module.to` would keep the parameters, and so their place."""
        for module in model.modules():
            for name, parameter in module._parameters.items():
                module._parameters[name] = nn.Parameter(parameter.detach().to(CUDA))
            for name, buffer in module._buffers.items():
                module._buffers[name] = buffer.to(CUDA)
        return model


class _Stream:
    """The one stream, and its events: all that was called is done."""

    device = CUDA

    def __init__(self, device: Any = None) -> None:
        self.record_event = lambda: self
        self.wait = self.wait_event = self.synchronize = lambda *_: None


@contextmanager
def absent_gpu() -> Iterator[AbsentGpu]:
    """Give this process a GPU that is not here, without Triton, for the length of a block."""
    with pytest.MonkeyPatch.context() as patch, AbsentGpu() as gpu:
        patch.setattr(torch.cuda, "Stream", _Stream)
        patch.setattr(torch.cuda, "current_stream", _Stream)
        patch.setattr(torch.cuda, "stream", AbsentGpu)
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
        patch.setattr(blockwise, "kernels", lambda x, block: None)
        yield gpu


STEPS = 16
A_ROUND_WAITS = 6  # at most: for norms, ballots, bytes; in the first rounds also for each parameter, to find twins


def learnt(group, name, device, steps=STEPS):
    """What was learnt, and how often the host waited for the device in each step."""
    with absent_gpu() if device == "cuda" else nullcontext() as gpu:
        model, noted = (gpu.move(net()), gpu.waits) if gpu else (net(), [])
        assert {parameter.device.type for parameter in model.parameters()} == {device}
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.5)
        outer = OuterLoop(model, RECIPES[name], group).attach(optimizer)
        waits = []
        for number in range(steps):
            before = len(noted)
            train(model, optimizer, number, group.rank)
            waits.append(len(noted) - before)
        outer.close()
        return {key: value.cpu() for key, value in model.state_dict().items()}, waits


def check_same(here, there):
    for (found, _), (expected, _) in zip(here, there, strict=True):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in found)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_ends_with_the_cpus_bits_and_waits_for_the_device_in_rounds_alone(name):
    size = 4 if name in ("hierarchical", "gossip", "noloco") else 2  # what two replicas can't show
    there = run_replicas(learnt, size, name, "cuda")
    check_same(there, run_replicas(learnt, size, name, "cpu"))
    for _, waits in there:
        if name not in ("hierarchical", "streaming_diloco", "streaming_diloco without delay"):  # due in each step
            assert waits.count(0) >= STEPS / 3
        assert max(waits[STEPS // 2 :]) <= A_ROUND_WAITS


def learnt_over_gloo(names, device):
    return [learnt(TorchGroup(), name, device, steps=9) for name in names]


@pytest.mark.long
def test_processes_that_send_from_a_gpu_end_with_the_cpus_bits_also_in_the_background():
    names = ["local_sgd", "diloco", "streaming_diloco", "eager_diloco", "sparse_loco"]
    there, here = (run_ranks(learnt_over_gloo, 2, names, device) for device in ("cuda", "cpu"))
    for mine, others in zip(there, here, strict=True):
        check_same(mine, others)


def test_a_tensor_of_the_host_among_those_of_the_device_is_found_and_so_is_a_wait():
    with absent_gpu() as gpu:
        x = torch.ones(3, device="cuda")
        assert (2 * x).device == CUDA
        with pytest.raises(AssertionError, match=r"add: a tensor of the host, of shape \[3\]"):
            x + torch.ones(3)
        assert gpu.waits == []
        assert float(x.sum()) == 3
        torch.empty(3).copy_(x)
        assert gpu.waits == ["__float__", "copy_"]
