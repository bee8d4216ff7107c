# SPDX-License-Identifier: Apache-2.0
"""An `Accelerator` with tensor parallelism, for which a script cuts the model, and with context parallelism."""

import math

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
from tests.accelerator.conftest import on_ranks
from tests.outer.parallel import PLAN, Attending, Block
from tests.outer.replicas import same

TP, FSDP_TP = {"tp_size": 2}, {"dp_shard_size": 2, "tp_size": 2}
CP, FSDP_CP, CP_TP = {"cp_size": 2}, {"dp_shard_size": 2, "cp_size": 2}, {"cp_size": 2, "tp_size": 2}
HSDP_TP = {"dp_replicate_size": 2, **FSDP_TP}
ISLANDS = {"dp_replicate_size": 2, "dp_shard_size": 2}


class Trainer:
    """A model, its optimizer and two loaders over one data set: shuffled for training, in order for an evaluation."""

    def __init__(self, sizes, samples=24, made=Block):
        AcceleratorState._reset_state()
        self.accelerator = accelerator = Accelerator(parallelism_config=ParallelismConfig(**sizes) if sizes else None)
        model = made().double()
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
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4 * num_readers, 0.5)
        self.model, self.optimizer, self.loader, self.in_order, self.scheduler = accelerator.prepare(
            model, optimizer, shuffled, in_order, scheduler
        )
        self.norms = []

    def epoch(self):
        for inputs, targets, _ in self.loader:
            with self.accelerator.maybe_context_parallel(buffers=[inputs, targets], buffer_seq_dims=[1, 1]):
                self.accelerator.backward((self.model(inputs) - targets).square().mean())
            self.norms.append(float(self.accelerator.clip_grad_norm_(self.model.parameters(), 0.05)))
            self.optimizer.step()
            self.scheduler.step()  # as often as there are processes with batches of their own
            self.optimizer.zero_grad()
        return self

    @torch.no_grad()
    def loss(self):
        """Return the loss of an evaluation."""
        losses = []
        for inputs, targets, _ in self.in_order:
            with self.accelerator.maybe_context_parallel(buffers=[inputs, targets], buffer_seq_dims=[1, 1]):
                losses.append((self.model(inputs) - targets).square().mean())
        return float(self.accelerator.reduce(torch.stack(losses).mean(), "mean"))

    def seen(self):
        """Return the samples that an evaluation counts."""
        gathered = [self.accelerator.gather_for_metrics(numbers) for _, _, numbers in self.in_order]
        return torch.cat(gathered).tolist()

    def values(self):
        """Return copies of whole weights, on the first rank."""
        state = self.accelerator.get_state_dict(self.model)
        return {name: value.clone() for name, value in state.items()}


def trained(sizes, folder, made):
    run = Trainer(sizes, made=made).epoch()
    run.accelerator.save_state(folder / "saved")
    before = run.values()
    again = Trainer(sizes, made=made)
    again.accelerator.load_state(folder / "saved")
    both = [one.epoch().values() for one in (run, again)]
    return run.norms, before, both, run.loss(), Trainer(sizes, 22, made).seen()


def loaded(sizes, folder, made):
    run = Trainer(sizes, made=made)
    run.accelerator.load_state(folder)
    return run.values()


def close(values, wanted):
    assert values.keys() == wanted.keys()
    return all(torch.allclose(value, wanted[name], rtol=0, atol=1e-9) for name, value in values.items())


@pytest.mark.parametrize(
    "sizes",
    [TP, CP, *(pytest.param(sizes, marks=pytest.mark.long) for sizes in (FSDP_TP, FSDP_CP, HSDP_TP))],
    ids=["tp", "cp", "fsdp+tp", "fsdp+cp", "hsdp+tp"],
)
def test_models_and_sequences_that_are_cut_train_and_resume_as_on_one_process(sizes, tmp_path):
    num_ranks = math.prod(sizes.values())
    made = Attending if "cp_size" in sizes else Block
    (norms, whole, (wanted, _), loss, _), *_ = run_ranks(trained, 1, {}, tmp_path / "one", made)
    ranks = run_ranks(trained, num_ranks, sizes, tmp_path / "several", made)
    own_norms, before, (after, again), own_loss, _ = ranks[0]
    assert own_loss == pytest.approx(loss)
    assert own_norms == pytest.approx(norms)
    assert close(before, whole)
    assert close(after, wanted)
    assert same(after, again)
    assert [sorted(seen) for *_, seen in ranks] == [list(range(22))] * num_ranks
    assert same(before, *run_ranks(loaded, 1, {}, tmp_path / "several" / "saved", made))
    assert same(whole, run_ranks(loaded, num_ranks, sizes, tmp_path / "one" / "saved", made)[0])


def in_islands(sizes, made):
    run = Trainer(sizes, made=made)
    with run.accelerator.outer(run.model, diloco(2)):
        run.epoch()
    return run.values()


@pytest.mark.long
@pytest.mark.law("islands-are-replicas")
@pytest.mark.parametrize(("sizes", "made"), [(TP, Block), (CP, Attending)], ids=["tp", "cp"])
def test_islands_of_fsdp_and_another_parallelism_train_as_those_of_fsdp_do(sizes, made):
    alone = run_ranks(in_islands, 4, ISLANDS, made)[0]
    assert close(run_ranks(in_islands, 8, ISLANDS | sizes, made)[0], alone)


@on_ranks(2)
def test_whole_models_and_what_does_not_go_with_tensor_parallelism_are_refused():
    for kind, words, sizes, act in (
        (ConfigError, "no parameter of this Block is a DTensor", TP, lambda made: made().prepare(Block())),
        (Unsupported, "island_size", TP, lambda made: made(island_size=2)),
        (Unsupported, "sequence parallelism is not supported", {"sp_size": 2}, lambda made: made()),
        (Unsupported, "can't be combined yet", CP_TP, lambda made: made()),
        (ConfigError, "0 buffers and 0 buffer_seq_dims", CP, lambda made: made().maybe_context_parallel()),
    ):
        AcceleratorState._reset_state()
        with pytest.raises(kind, match=words):
            act(lambda sizes=sizes, **asked: Accelerator(parallelism_config=ParallelismConfig(**sizes), **asked))
