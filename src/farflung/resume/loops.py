# SPDX-License-Identifier: Apache-2.0
"""The outer loops: each rank's own states, which are merged if another number of ranks continues."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from farflung.base.errors import CheckpointError
from farflung.base.words import counted
from farflung.checkpoint import paths
from farflung.resume import lazy, models
from farflung.resume.part import Loading, Part, Saving


class OuterLoops(Part):
    """The outer loops that are open, and those of a checkpoint that were not opened again yet."""

    def per_rank(self, saving: Saving) -> Mapping[str, dict[str, Any]]:
        loops = self.run.outers.states()
        if not loops and (saving.leads or not self.run.replicas_differ):
            return {}
        return {paths.outer_state(self.run.world.rank): {"loops": loops}}

    def read(self, source: Loading) -> None:
        self._check_columns(source)
        self._states: list[dict[str, Any]] = source.apart.get("loops", [])
        self._weights: list[dict[str, Tensor]] = []
        if source.is_other:
            self._redistribute(source)
        if self.run.outers.can_begin_here and not self._states:
            source.notes.append("it was written without outer loops: they start from its weights")
        elif len(self._states) < len(self.run.outers.live):
            raise CheckpointError(
                f"{source.checkpoint.folder} has the state of {counted(len(self._states), 'outer loop')}, but here "
                f"there are {len(self.run.outers.live)}. Call load_state before you open them."
            )

    def _check_columns(self, source: Loading) -> None:
        rank = 0 if source.is_other else source.rank
        if not source.checkpoint.has(paths.outer_state(rank)):
            return
        before, here = _columns((source.first or {}).get("spread")), _columns(self.run.spread)
        if before != here:
            raise CheckpointError(
                f"{source.checkpoint.folder} has outer loops over models that were sharded over "
                f"{counted(before, 'rank')}, but here they are sharded over {counted(here, 'rank')}. Load it with "
                f"dp_shard_size={before} and any number of replicas; or begin new outer loops from the weights of its "
                "first island, which farflung.utils.merge_fsdp_weights makes whole."
            )

    def _redistribute(self, source: Loading) -> None:
        """Merge the loops of the ranks that held the same shards as this one does."""
        spread = self.run.spread
        column = 0 if spread is None else spread[0].index(source.rank)
        ranks = range(column, source.old_size, _columns(spread))
        names = [paths.outer_state(rank) for rank in ranks if rank in source.known]
        if not names or not all(map(source.checkpoint.has, names)):
            return
        columns = zip(*(source.checkpoint.read(name)["loops"] for name in names), strict=True)
        merged = [lazy.states.merge_states(column) for column in columns]
        self._weights = [one.weights for one in merged]
        self._states = [one.state for one in merged if one.state is not None]
        if len(self._states) < len(merged):
            self._states = []
            source.notes.append(
                "their outer loop starts over from there, because its anchors included a round that was in flight"
            )

    def fill(self) -> None:
        used: list[nn.Module] = []
        for weights in self._weights:  # the mean, if the model's file has those of one replica
            here = [(len(weights.keys() & one.state_dict().keys()), -used.count(one)) for one in self.run.bare_models]
            model = self.run.bare_models[here.index(max(here))]
            used.append(model)
            names = model.state_dict().keys()
            models.load(model, {name: value for name, value in weights.items() if name in names}, strict=False)
        self.run.outers.load(self._states)


def _columns(spread: tuple[list[int], str] | None) -> int:
    return 1 if spread is None else len(spread[0])
