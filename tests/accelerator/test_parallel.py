# SPDX-License-Identifier: Apache-2.0
"""An `Accelerator` over models that a script has cut by tensor parallelism, alone or with FSDP2 over it."""

import pytest
import torch
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.data import DataLoader, TensorDataset

from farflung import Accelerator
from farflung.base.errors import ConfigError, Unsupported
from farflung.config.parallelism import ParallelismConfig
from farflung.outer import diloco
from farflung.state import AcceleratorState
from farflung.testing.ranks import run_ranks
from tests.outer.parallel import PLAN, Block
from tests.outer.replicas import same

TP, FSDP_TP = {"tp_size": 2}, {"dp_shard_size": 2, "tp_size": 2}
ISLANDS = {"dp_replicate_size": 2, "dp_shard_size": 2}


class Trainer:
    """A model, its optimizer and two loaders over one data set: shuffled for training, in order for an evaluation."""

    def __init__(self, sizes, samples=24):
        AcceleratorState._reset_state()
        self.accelerator = accelerator = Accelerator(parallelism_config=ParallelismConfig(**sizes) if sizes else None)
        model = Block().double()
        if "tp_size" in sizes:
            parallelize_module(model, accelerator.torch_device_mesh["tp"], PLAN)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=0.05, foreach=False)
        generator = torch.Generator().manual_seed(7)
        inputs = torch.randn(samples, 4, 16, generator=generator, dtype=torch.float64)
        data = TensorDataset(inputs, torch.tanh(inputs[..., :5]), torch.arange(samples))
        num_readers = sizes.get("dp_replicate_size", 1) * sizes.get("dp_shard_size", 1)
        order = torch.Generator().manual_seed(11 + accelerator.process_index)  # all take that of the first
        shuffled = DataLoader(data, batch_size=4 // num_readers, shuffle=True, generator=order)
        in_order = DataLoader(data, batch_size=3)
        self.model, self.optimizer, self.loader, self.in_order = accelerator.prepare(
            model, optimizer, shuffled, in_order
        )
        self.norms = []

    def epoch(self):
        for inputs, targets, _ in self.loader:
            self.accelerator.backward((self.model(inputs) - targets).square().mean())
            self.norms.append(float(self.accelerator.clip_grad_norm_(self.model.parameters(), 0.05)))
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def seen(self):
        """Return the samples that an evaluation counts."""
        gathered = [self.accelerator.gather_for_metrics(numbers) for _, _, numbers in self.in_order]
        return torch.cat(gathered).tolist()

    def values(self):
        """Return copies of whole weights, on the first rank."""
        state = self.accelerator.get_state_dict(self.model)
        return {name: value.clone() for name, value in state.items()}


def trained(sizes, folder):
    run = Trainer(sizes).epoch()
    run.accelerator.save_state(folder / "saved")
    before = run.values()
    again = Trainer(sizes)
    again.accelerator.load_state(folder / "saved")
    both = [one.epoch().values() for one in (run, again)]
    return run.norms, before, both, Trainer(sizes, 22).seen()


def loaded(sizes, folder):
    run = Trainer(sizes)
    run.accelerator.load_state(folder)
    return run.values()


def close(values, wanted):
    assert values.keys() == wanted.keys()
    return all(torch.allclose(value, wanted[name], rtol=0, atol=1e-9) for name, value in values.items())


@pytest.mark.parametrize("sizes", [TP, pytest.param(FSDP_TP, marks=pytest.mark.long)], ids=["tp", "fsdp+tp"])
def test_a_model_that_the_script_has_cut_trains_and_resumes_as_on_one_process(sizes, tmp_path):
    num_ranks = sizes["tp_size"] * sizes.get("dp_shard_size", 1)
    (norms, whole, (wanted, _), _), *_ = run_ranks(trained, 1, {}, tmp_path / "one")
    ranks = run_ranks(trained, num_ranks, sizes, tmp_path / "several")
    own_norms, before, (after, again), _ = ranks[0]
    assert own_norms == pytest.approx(norms)
    assert close(before, whole)
    assert close(after, wanted)
    assert same(after, again)
    assert [sorted(seen) for *_, seen in ranks] == [list(range(22))] * num_ranks
    assert same(before, *run_ranks(loaded, 1, {}, tmp_path / "several" / "saved"))
    assert same(whole, run_ranks(loaded, num_ranks, sizes, tmp_path / "one" / "saved")[0])


def in_islands(sizes):
    run = Trainer(sizes)
    with run.accelerator.outer(run.model, diloco(2)):
        run.epoch()
    return run.values()


@pytest.mark.long
@pytest.mark.law("islands-are-replicas")
def test_islands_of_fsdp_over_tensor_parallelism_train_as_those_of_fsdp_do():
    assert close(run_ranks(in_islands, 8, ISLANDS | TP)[0], run_ranks(in_islands, 4, ISLANDS)[0])


def refusals():
    texts = []
    for kind, make in (
        (ConfigError, lambda: Accelerator(parallelism_config=ParallelismConfig(**TP)).prepare(Block())),
        (Unsupported, lambda: Accelerator(parallelism_config=ParallelismConfig(**TP), island_size=2)),
        (Unsupported, lambda: Accelerator(parallelism_config=ParallelismConfig(cp_size=2))),
    ):
        AcceleratorState._reset_state()
        with pytest.raises(kind) as caught:
            make()
        texts.append(str(caught.value))
    return texts


def test_whole_models_and_what_does_not_go_with_tensor_parallelism_are_refused():
    whole, islands, context = run_ranks(refusals, 2)[0]
    assert "no parameter of this Block is a DTensor" in whole
    assert "island_size" in islands
    assert "context parallelism is not supported" in context
