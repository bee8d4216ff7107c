# SPDX-License-Identifier: Apache-2.0
"""Weights that are offloaded and used by another module than their own: right values, or an error that names them."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from farflung.base.errors import StateError
from farflung.big_modeling import cpu_offload, disk_offload, dispatch_model
from farflung.hooks import attach_align_device_hook, remove_hook_from_submodules
from farflung.utils import set_module_tensor_to_device

IDS = torch.arange(7)[None]


class Parent(nn.Module):
    """Reads weights of children and grandchildren, ties without tying, and has torch's layers that do the same."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.proj = nn.Linear(4, 4)
        self.inner = nn.Sequential(nn.Linear(4, 4))
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, ids):
        x = F.linear(self.embed(ids), self.proj.weight, bias=self.proj.bias)
        x = x @ self.inner[0].weight.to(x.dtype).T + torch.cat([self.proj.weight, self.inner[0].weight.data]).sum()
        x = self.layer(x + self.attention(x, x, x, need_weights=False)[0]) * self.norm.running_var
        return x @ self.embed.weight.T


def parent(train=False):
    torch.manual_seed(0)
    model = Parent().train(train).requires_grad_(False)
    model.norm.running_var.uniform_(1, 2)
    return model, model(IDS)


def by_map(model, folder):
    parts = {name: "disk" for name, _ in model.named_children()} | {"embed": "cpu"}
    return dispatch_model(model, parts, offload_dir=folder)


OFFLOADS = {
    "on cpu": lambda model, folder: cpu_offload(model, offload_buffers=True),
    "on disk": lambda model, folder: disk_offload(model, folder, offload_buffers=True),
    "by map": by_map,
    "by hooks": lambda model, folder: attach_align_device_hook(model, offload=True),
    "preloaded": lambda model, folder: cpu_offload(model, preload_module_classes=["Parent"]),
}


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("offload", OFFLOADS.values(), ids=OFFLOADS)
def test_a_parent_computes_with_the_values_of_offloaded_weights(offload, train, tmp_path):
    model, expected = parent(train)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    offload(model, tmp_path)
    assert model.proj.weight.is_meta
    assert isinstance(model.proj.weight, nn.Parameter)
    # In evaluation torch's layers take their fast path only without offloaded weights: other kernels, other roundings.
    torch.testing.assert_close(model(IDS), expected)
    assert model.proj.weight.is_meta
    assert torch.equal(model.proj.weight.T, saved["proj.weight"].T)  # outside of the forward pass too
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file)
    assert all(torch.equal(loaded[name], value) for name, value in saved.items())
    torch.testing.assert_close(copy.deepcopy(model)(IDS), expected)
    remove_hook_from_submodules(model)
    assert all(type(value) is nn.Parameter and torch.equal(value, saved[n]) for n, value in model.named_parameters())


def test_what_would_change_an_offloaded_weight_is_refused_by_name(tmp_path):
    model, expected = parent()
    saved = model.state_dict()
    disk_offload(model, tmp_path, offload_buffers=True)
    words = r"would change proj.weight of Linear, which is offloaded.*remove_hook_from_submodules"
    for change in (
        lambda weight: weight.add_(1),
        lambda weight: weight.data.copy_(torch.ones(4, 4)),
        nn.init.zeros_,
        lambda weight: torch.add(torch.ones(4, 4), 1, out=weight),
        lambda weight: weight.__setitem__(0, 1),
    ):
        with pytest.raises(StateError, match=words):
            change(model.proj.weight)
    words = r"would change embed\.weight of Embedding"
    with pytest.warns(UserWarning, match="no-op"), pytest.raises(RuntimeError, match=words):
        model.load_state_dict(saved)
    average = torch.zeros(4, 4)
    average.lerp_(model.proj.weight, 1.0)
    assert torch.equal(average, saved["proj.weight"])
    torch.testing.assert_close(model(IDS), expected)


def test_gradients_pass_through_a_weight_of_a_child_and_are_refused_for_it():
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    weight = model[0].weight.detach().clone()
    cpu_offload(model)
    with pytest.raises(StateError, match=r"shape \[2, 2\] are offloaded"):
        F.linear(torch.ones(1, 2), model[0].weight).sum().backward()
    model.requires_grad_(False)
    x = torch.ones(1, 2, requires_grad=True)
    F.linear(x, model[0].weight).sum().backward()
    assert torch.equal(x.grad, weight.sum(0, keepdim=True))


def test_an_offloaded_weight_says_what_it_is_without_its_values(monkeypatch):
    model = nn.Sequential(nn.Linear(2, 3))
    saved = model[0].weight.detach().clone()
    cpu_offload(model)
    monkeypatch.setattr(type(model[0].weight.source), "fetch", None)  # would be an error
    weight = model[0].weight
    assert (weight.shape, weight.dtype, weight.device.type, weight.numel()) == ((3, 2), torch.float32, "meta", 6)
    assert (weight.requires_grad, weight.is_leaf, weight.grad) == (True, True, None)
    assert "meta" in repr(weight)
    model.requires_grad_(False)
    model.half()  # converts what is brought later, too
    assert (model[0].weight.dtype, model[0].weight.requires_grad) == (torch.float16, False)
    monkeypatch.undo()
    assert torch.equal(model[0].weight + 0, saved.half())
    assert torch.equal(model[0].weight.float() + 0, saved.half().float())
    set_module_tensor_to_device(model, "0.weight", "cpu", value=saved)
    assert type(model[0].weight) is nn.Parameter
