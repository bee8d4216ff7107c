# SPDX-License-Identifier: Apache-2.0
"""Running means of what an Accelerator trains without an outer loop: evaluated, exported and left in their place."""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import nn

from farflung.comm.shards import local
from farflung.hosts.evaluation import MODE_LISTENERS, EvaluatedModel, evaluates, follow_modes
from farflung.loop.ema import WeightAverage, means_in
from farflung.resume.run import Run


class EMAModel(EvaluatedModel):
    """A prepared model that has the means of its weights from `eval()` on, until it trains again."""

    def __init__(self, model: nn.Module, bare: nn.Module, averages: list[WeightAverage]) -> None:
        super().__init__(model, bare)
        self._averages = averages
        follow_modes(self)

    def follow(self, average: WeightAverage) -> None:
        """Train its own weights again before a step of this optimizer."""
        self.hooks.append(average.optimizer.register_step_pre_hook(lambda *_: self.evaluation.end()))

    @property
    def lends(self) -> bool:
        """Whether there are means yet."""
        return any(average.means_of(self.bare.parameters()) for average in self._averages)

    @property
    def has_own_evaluation(self) -> bool:
        return any(evaluates(average.optimizer) for average in self._averages)

    def agreed(self, module: nn.Module) -> AbstractContextManager[None]:
        """Have the means in the model within a block."""
        return means_in(module, self._averages)

    def mode_changed(self, module: nn.Module, was_training: bool) -> None:
        """Put the means into the model for an evaluation."""
        if self.holds(module):
            self.evaluation.change(module.training, self if was_training else None)

    def drop(self) -> None:
        """Let go of the model, which has its own weights."""
        self.evaluation.end()
        MODE_LISTENERS.discard(self)
        for hook in self.hooks:
            hook.remove()

    def end(self) -> None:
        """Leave the means in the model."""
        self.drop()
        for average in self._averages:
            for parameter, mean in average.means_of(self.bare.parameters()):
                local(parameter).copy_(mean)


class EMA:
    """The means of all that one Accelerator trains; for `size` and `every` see `WeightAverage`."""

    def __init__(self, size: float, every: int, run: Run) -> None:
        self._size, self._every, self._run = size, every, run
        self._kept: list[WeightAverage] = []
        self.models: list[EMAModel] = []

    def attach(self) -> None:
        """Follow what was prepared since the last call."""
        new = [one for one in self._run.bare_optimizers if all(one is not kept.optimizer for kept in self._kept)]
        for model in self._run.trained:
            if all(model is not one.model for one in self.models):
                self.models.append(EMAModel(model, self._run.strategy.unwrap(model), self._kept))
                for average in self._kept:
                    self.models[-1].follow(average)
        for optimizer in new:
            self._kept.append(WeightAverage(optimizer, self._size, self._every))
            for one in self.models:
                one.follow(self._kept[-1])

    def drop(self) -> None:
        """Forget all models and their means: what is prepared afterwards has others."""
        for one in self.models:
            one.drop()
        for average in self._kept:
            average.hook.remove()
        self.models, self._kept = [], []

    def end(self) -> None:
        """Leave the means in the models, and keep none from now on."""
        for one in self.models:
            one.end()
        self.drop()
