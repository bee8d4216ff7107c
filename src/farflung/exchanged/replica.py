# SPDX-License-Identifier: Apache-2.0
"""This rank's model as an outer loop sees it: fragments bound to memory, with all their state between rounds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from farflung.comm.group import Group, SoloGroup
from farflung.comm.shards import local, model_has_dtensor, reshard
from farflung.comm.tensor_memory import lent
from farflung.exchanged.bound import BoundFragment
from farflung.exchanged.comparison import frozen_fingerprints, moved, synchronize
from farflung.exchanged.structure import described, line_of, structure_of, text_of
from farflung.exchanged.trained import TrainedSet
from farflung.methods.fragments import Fragment, TensorPlace, training, without_masks
from farflung.methods.momentum import OuterSGD
from farflung.methods.recipe import Recipe
from farflung.votes.generation import Generation, Layout


@dataclass(frozen=True)
class ModelChange:
    """The tensors that are exchanged after the model has changed."""

    fragments: list[Fragment]
    fit: list[Fragment]  # the same without buffers that can't be averaged
    description: str  # see `described`, like the tensors
    tensors: list[str]
    vote: str  # what ranks that have made the same change all say of it
    new: list[TensorPlace]  # parameters that were not trained before
    must_agree: bool  # all ranks must have made the same change before any of them continues


class Replica:
    """All fragments of a model. Making one sends nothing; the first generation does.

    Args:
        num_buffers, island_size: see `BoundFragment`.

    Attributes:
        description: all that must be the same on all ranks: recipe, shapes, cut; `parts` has it one by one.
        tensors: a line for each tensor that is exchanged; the description has only a digest of them.
        could: the same of each tensor that may be exchanged at some time.
        trained: which parameters are exchanged, and which have been trained since the last round.
        fragments: bound to memory.

    All ranks exchange the same parameters: any that a rank has trained; at first, all that require gradients.
    What none has trained between two rounds of the first fragment leaves it.
    """

    def __init__(
        self, model: nn.Module, recipe: Recipe, cap_bytes: int, num_buffers: int | None, island_size: int = 1
    ) -> None:
        self._model = model
        self._recipe = self._tuned = recipe
        self.cap_bytes, self._num_buffers, self._island_size = cap_bytes, num_buffers, island_size
        self.is_sharded = model_has_dtensor(model)
        self.trained = TrainedSet(recipe.has_anchor, recipe.beside[0])
        self._read(recipe.fragments(model, recipe.schedule.fragments))  # it names what can't be sent
        self.fragments: list[BoundFragment] = []

    def _read(self, cut: list[Fragment]) -> None:
        """Take over the model's current structure, and what is exchanged of it."""
        self._structure = structure_of(self._model)
        self.trained.read(self._model, self._structure[1][0])
        self._lay_out(cut)

    def _lay_out(self, cut: list[Fragment]) -> None:
        self._cut = cut
        self.parts, self.tensors = described(self._recipe, cut, self.cap_bytes)
        self.description = text_of(self.parts)
        self.trained.exchange({place.name for one in cut for place in one.parameters})
        buffers = [place for one in cut for place in (*one.averages, *one.counters)]
        self.could = [line_of(place) for place in (*self.trained.places.values(), *buffers)]

    @property
    def device(self) -> torch.device:
        return next((parameter.device for parameter in self._model.parameters()), torch.device("cpu"))

    @property
    def layout(self) -> Layout:
        return [[[place.name for place in kind] for kind in fragment.kinds] for fragment in self._cut]

    def align(self, layout: Layout) -> tuple[str, Sequence[str]]:
        """Exchange what others do, if this model has all of it; otherwise the next vote finds the difference."""
        here = {place.name: place for fragment in self._cut for place in fragment.places} | self.trained.places
        names = [name for fragment in layout for kind in fragment for name in kind]
        if layout != self.layout and here.keys() >= set(names):
            kept = {place.name for fragment in self.fragments for place in fragment.cut.averages}
            self._lay_out([Fragment(*(tuple(here[name] for name in kind) for kind in one)) for one in layout])
            if self.fragments:
                known = {place.name: place.name in kept for one in self._cut for place in one.averages}
                self._bind_again([without_masks(one, known) for one in self._cut], {}, keeps_digest=True)
        return self.description, self.tensors

    def retrain(self, names: Collection[str], anchors: Mapping[int, Tensor]) -> None:
        """Exchange exactly these parameters from now on. Any that are dropped have those of the last round.

        Args:
            anchors: the agreed values, `[numel]`, of newly exchanged parameters, by the parameter's id.
        """
        new = self.trained.coming(names)
        numbers = self._numbers_of(new)
        for fragment in self.fragments:
            # Those of a common anchor go without its look-ahead, as the momentum is dropped too.
            rows = fragment.latest() if self._recipe.has_anchor else fragment.kept().get("anchor", {})
            for place in fragment.cut.parameters:
                row = rows.get(id(place.get()))
                if place.name not in names and row is not None:
                    target = local(place.get())
                    target.copy_(row.view(target.shape))

        def changed(number: int, one: Fragment) -> Fragment:
            stay = tuple(place for place in one.parameters if place.name in names)
            return replace(one, parameters=(*stay, *(place for place in new if numbers[place.name] == number)))

        fit = [changed(number, bound.cut) for number, bound in enumerate(self.fragments)]
        self._lay_out([changed(number, one) for number, one in enumerate(self._cut)])
        self._bind_again(fit, {"anchor": dict(anchors), "average": dict(anchors)})

    def _numbers_of(self, new: Sequence[TensorPlace]) -> dict[str, int]:
        """Return the fragment of each new parameter: where it would be if all were exchanged."""
        if len(self._cut) == 1 or not new:
            return dict.fromkeys((place.name for place in new), 0)
        with training(self._model, lambda one: True):
            cut = self._recipe.fragments(self._model, len(self._cut))
        return {place.name: number for number, one in enumerate(cut) for place in one.parameters}

    def _bind_again(
        self, fit: Sequence[Fragment], rows: dict[str, dict[int, Tensor]], keeps_digest: bool = False
    ) -> None:
        """Bind fragments that have changed, with the state of the parameters that they still have, and new `rows`."""
        kept = rows
        for fragment in self.fragments:
            for name, mine in fragment.kept().items():
                kept.setdefault(name, {}).update(mine)
        for number, one in enumerate(fit):
            bound = self._bound(one, self._group, is_new=False)
            bound.continue_from(self.fragments[number], kept)
            bound.comparison.digest = bound.comparison.digest if keeps_digest else -1
            self.fragments[number] = bound

    def synchronize(self, giver: int, takes: bool) -> None:
        """Take over values that no round exchanges from a rank, if they differ: a collective."""
        reshard(self._model.modules())
        synchronize(self._model, self.trained.ids(), self._group, giver, takes)

    def moved(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the frozen weights that are not the same on all ranks any more, and such masks: a collective.

        What began with an infinity counts as a mask, as the least and the largest value that an observer has seen do.
        """
        reshard(self._model.modules())
        kept = {place.name for fragment in self.fragments for place in fragment.cut.averages}
        masks = {one.name: one.get() for each in self._cut for one in each.averages if one.name not in kept}
        return moved(self._model, self.trained.ids(), masks, self._group)

    def frozen(self) -> dict[str, int]:
        """Return a number for each frozen weight, which tells whether it has changed."""
        reshard(self._model.modules())
        return frozen_fingerprints(self._model, self.trained.ids())

    def tune(self, every: int | None) -> None:
        """Set the outer optimizers' rate and momentum for this H; None restores the recipe's initial settings."""
        made = self._recipe.optimizer
        if isinstance(made, OuterSGD):
            made = made if every is None else replace(made, every=every)
            self._tuned = replace(self._recipe, optimizer=made)
            for fragment in self.fragments:
                fragment.weights.tune(made)

    def _bound(self, fragment: Fragment, group: Group, is_new: bool) -> BoundFragment:
        return BoundFragment(fragment, self._tuned, group, self.cap_bytes, self._num_buffers, self._island_size, is_new)

    def enter(self, generation: Generation, before: Sequence[int]) -> None:
        """Continue with the members of a generation, given those of `before`: a collective the first time."""
        has_values, self._group = bool(self.fragments), generation.group
        if not has_values:
            group = SoloGroup() if generation.joins else generation.group
            self.fragments = [self._bound(fragment, group, is_new=True) for fragment in self._cut]
        for fragment in self.fragments if has_values or generation.joins else ():
            fragment.enter(before, generation.ids)

    def continue_from(self, before: Replica, generation: Generation) -> None:
        """Exchange what `before` did, from what all members share, with this rank's steps since; nothing is sent."""
        self._group = generation.group
        with before.kept(before.trained.moved(), lambda _: before.adopt()):
            self.fragments = [self._bound(fragment, SoloGroup(), is_new=True) for fragment in self._cut]
        self.trained.continue_from(before.trained)
        for fragment in self.fragments:
            fragment.enter((), generation.ids)
            fragment.count(before.fragments[0].pending_weight[0])

    def note_newcomers(self) -> None:
        """Compare the agreed weights in the next rounds, and in the next vote if they are the same on all ranks."""
        for fragment in self.fragments:
            fragment.comparison.note_newcomers(fragment.weights, self._recipe.has_anchor)

    def may_keep(self) -> bool:
        """Return whether this rank's steps since the last rounds can be separated from what all share."""
        return self._recipe.has_anchor and self.is_shared() and not self._has_changed()

    def is_shared(self) -> bool:
        """Return whether this rank has what all shared after the latest round, perhaps with its own steps since."""
        is_split = any(fragment.num_landed for fragment in self.fragments)  # a part of a round is in both
        has_steps = any(fragment.pending_weight[0] for fragment in self.fragments)
        return bool(self.fragments) and not is_split and (self._recipe.has_anchor or not has_steps)

    def rebind(self, number: int) -> None:
        """Find a fragment's tensors again, unless the model has changed: the next round follows that."""
        if not self._has_changed():
            self.fragments[number].rebind()

    def _has_changed(self) -> bool:
        """Return whether a tensor was added, replaced, removed, tied, untied or changed in kind."""
        return structure_of(self._model)[0] != self._structure[0]

    def change(self) -> ModelChange | None:
        """Return the model's current structure, if it has changed since the last round."""
        if not self._has_changed():
            return None
        kept = {place.name for fragment in self.fragments for place in fragment.cut.places}
        known = {place.name: place.name in kept for one in self._cut for place in one.averages}
        fragments = self._cut_again()
        parts, tensors = described(self._recipe, fragments, self.cap_bytes)
        description = text_of(parts)
        fit = [without_masks(fragment, known) for fragment in fragments]
        sizes = {id(tensor): tensor.numel() for fragment in self.fragments for tensor in fragment.trained}
        new = [p for one in fit for p in one.parameters if sizes.get(id(p.get())) != p.get().numel()]
        buffers = [place.name for one in fit for place in one.averages if place.name not in known]
        vote = f"{description}; new: {[place.name for place in new]} {buffers}"
        must_agree = description != self.description or bool(new and self._recipe.optimizer)
        return ModelChange(fragments, fit, description, tensors, vote, new, must_agree)

    def follow(self, change: ModelChange) -> None:
        """Continue with the model's current structure, and the state of the parameters that it still has."""
        self._read(change.fragments)
        self._bind_again(change.fit, {}, keeps_digest=not change.must_agree)

    def _cut_again(self) -> list[Fragment]:
        """Cut a model that has changed: of what it had, what is exchanged; of what is new, what requires gradients."""
        exchanged, before = self.trained.ids(), self.trained.moves.known
        named = {
            id(one) for name, one in self._model.named_parameters(remove_duplicate=False) if name in self.trained.names
        }
        ids = exchanged | named
        with training(self._model, lambda one: id(one) in ids or (id(one) not in before and one.requires_grad)):
            return self._recipe.fragments(self._model, self._recipe.schedule.fragments)

    def adopt(self) -> None:
        for number, fragment in enumerate(self.fragments):
            self.rebind(number)
            fragment.weights.adopt()
        self.trained.adopt()

    def lend(self) -> None:
        """Put the values to evaluate into the model. Training may continue with other ones."""
        for number, fragment in enumerate(self.fragments):
            self.rebind(number)
            fragment.lend()
        self.trained.adopt()

    def reset_anchor(self, is_set: bool = True) -> None:
        """anchor <- local; see `Averaged.reset_anchor`."""
        for number, fragment in enumerate(self.fragments):
            self.rebind(number)
            fragment.reset_anchor(is_set)

    def count(self, amount: float) -> None:
        self.trained.moves.count()
        for fragment in self.fragments:
            fragment.count(amount)

    def reset(self, is_set: bool = True) -> None:
        self.reset_anchor(is_set)
        self.trained.forget_moves()
        for fragment in self.fragments:
            fragment.pending_weight = [0.0] * len(fragment.pending_weight)

    @contextmanager
    def kept(
        self, coming: Sequence[TensorPlace], lend: Callable[[list[tuple[Tensor, Tensor]]], None]
    ) -> Iterator[None]:
        """Have other weights and buffers in the model within the block, and then this rank's own.

        What a script has written meanwhile stays: an EMA's restore(), for one. The model may move to another device.

        Args:
            coming: parameters that are not exchanged yet, and are restored too.
            lend: puts them there, given the tensors with their values before.
        """
        places = [place for fragment in self.fragments for place in fragment.cut.places]
        found = [(place, place.owner.get(place.key)) for place in (*places, *coming)]
        there = [(place, one) for place, one in found if isinstance(one, Tensor)]

        def tensors() -> list[Tensor]:
            reshard(self._model.modules())
            return [local(place.owner.get(place.key, one)) for place, one in there]

        with lent(self._model, tensors, lend):
            yield
