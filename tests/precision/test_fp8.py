# SPDX-License-Identifier: Apache-2.0
"""fp8: refused where it can't be, and emulated on a CPU, which computes what the hardware would."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from farflung import Accelerator
from farflung.base.errors import ConfigError, Unsupported
from farflung.config.handlers import AORecipeKwargs
from farflung.config.sharding import FullyShardedDataParallelPlugin
from farflung.precision import fp8
from farflung.precision.fp8 import Float8

CPU = torch.device("cpu")


def test_fp8_is_refused_without_torchao_and_on_hardware_without_it(monkeypatch):
    monkeypatch.setattr(fp8, "installed_version", lambda library: "")
    with pytest.raises(Unsupported, match=r"pip install torchao.*bf16"):
        Float8(CPU)
    monkeypatch.setattr(fp8, "installed_version", lambda library: "1.0")
    with pytest.raises(Unsupported, match=r"not on cpu. Use mixed_precision='bf16'"):
        Float8(CPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    with pytest.raises(Unsupported, match="A100 does not compute in fp8"):
        Float8(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert Float8(torch.device("cuda")).name == "fp8"


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_under_fsdp_a_recipe_asks_for_fp8_by_itself(precision, monkeypatch):
    monkeypatch.setattr(fp8, "installed_version", lambda library: "1.0")
    recipe = AORecipeKwargs(config=SimpleNamespace(emulate=True))
    plugin = FullyShardedDataParallelPlugin()
    for _ in range(2):  # the second one has the same settings
        accelerator = Accelerator(cpu=True, mixed_precision=precision, fsdp_plugin=plugin, kwargs_handlers=[recipe])
        assert (accelerator.mixed_precision, accelerator.ao_recipe_handler) == ("fp8", recipe)
        assert accelerator.state.mixed_precision == "fp8"


def test_weights_that_are_gathered_in_fp8_are_refused_in_a_config_too():
    with pytest.raises(Unsupported, match="enable_fsdp_float8_all_gather=True is not supported"):
        AORecipeKwargs(config=SimpleNamespace(enable_fsdp_float8_all_gather=True))


def test_layers_between_the_first_and_the_last_are_converted_where_their_sizes_fit():
    layers = [nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 30), nn.Linear(30, 32), nn.Linear(32, 16)]
    model = nn.Sequential(*layers)
    ends = fp8.find_first_last_linear_layers(model)
    assert ends == ("0", "4")
    taken = [name for name, layer in model.named_children() if fp8.filter_linear_layers(layer, name, ends)]
    assert taken == ["1"]
    assert fp8.find_first_last_linear_layers(nn.ReLU()) == (None, None)


def test_an_emulated_model_trains_with_its_own_parameters():
    float8 = pytest.importorskip("torchao.float8", reason="torchao is not installed: it is for GPUs")
    recipe = AORecipeKwargs(config=float8.Float8LinearConfig(emulate=True))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 16))
    parameters = list(model.parameters())
    accelerator = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[recipe])
    assert accelerator.mixed_precision == "fp8"
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    assert fp8.has_ao_layers(model)
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    x = torch.randn(32, 16)
    losses = []
    for _ in range(30):
        loss = (model(x) - x).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    with pytest.raises(ConfigError, match="itself a linear layer"):
        fp8.convert_model_to_fp8_ao(nn.Linear(16, 16), module_filter_func=lambda module, name: True)
    with pytest.warns(UserWarning, match="no layer of this Sequential"):
        accelerator.prepare(nn.Sequential(nn.Linear(16, 16)))
