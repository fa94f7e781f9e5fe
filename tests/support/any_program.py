"""Programs at random: loops of all shapes, in any order, and what they deliver."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from elasticrun import (
    AdaptiveDataLoader,
    AdaptiveDataParallel,
    CombinedLoader,
    Variables,
    current_epoch,
    rank,
    remaining_epochs_until,
    remaining_steps_until,
    request_stop,
    world_size,
)
from elasticrun.checkpoint.states.generators import seed_all
from elasticrun.data.order.shares import BatchSplit
from elasticrun.job.current import current_job
from tests.support.data import Numbers
from tests.support.generations import Crash, draw_from_each


@dataclass(frozen=True)
class Loop:
    """A loop over one of the loaders, and how it ends once it has come that far.

    Attributes:
        num_batches: Of endless passes; None for a loop over one.
        inside: Loops in the body of each batch.
        rate: Every how many batches the second optimizer steps.
    """

    loader: int
    ending: str = "end"
    after: int = 0
    num_batches: int | None = None
    inside: tuple[Loop, ...] = ()
    rate: int = 1


@dataclass(frozen=True)
class Steps:
    """More steps, perhaps left by `break` in one of them."""

    num_steps: int
    inside: tuple[Loop, ...] = ()
    break_in: int | None = None


@dataclass(frozen=True)
class Epochs:
    """An epoch loop, perhaps left by `break` in one of its epochs."""

    num_epochs: int
    loops: tuple[Loop | Steps, ...]
    break_in: int | None = None


@dataclass(frozen=True)
class ByHand:
    """Batches of a loader by `next`, pass after pass; the last part of a program."""

    loader: int
    num_batches: int


NUM_SINGLE = 6  # The loaders after these are combined ones.

Program = list[Loop | Steps | Epochs | ByHand]
Batch = tuple[Any, ...]  # The place, the loader and the batch's number.
Delivered = list[tuple[Batch, dict[str, list[float]]]]

endings = st.sampled_from(["end", "end", "break", "exception"])
rates = st.sampled_from([1, 1, 2, 3])
inner_loops = st.builds(
    Loop,
    loader=st.sampled_from([2, 3, 5, 8]),
    ending=endings,
    num_batches=st.none() | st.integers(0, 3),
)
loops = st.builds(
    Loop,
    loader=st.sampled_from([0, 1, 2, 4, 5, 6, 7]),
    ending=endings,
    after=st.integers(0, 2),
    num_batches=st.none() | st.integers(0, 6),
    rate=rates,
) | st.builds(
    Loop,
    loader=st.sampled_from([0, 1, 6]),
    num_batches=st.none() | st.integers(0, 4),
    inside=st.lists(inner_loops, min_size=1, max_size=2).map(tuple),
    rate=rates,
)
steps = st.builds(
    Steps,
    num_steps=st.integers(0, 4),
    inside=st.lists(inner_loops, max_size=1).map(tuple),
    break_in=st.none() | st.integers(0, 5),
)
epochs = st.builds(
    Epochs,
    num_epochs=st.integers(0, 3),
    loops=st.lists(loops | steps, max_size=3).map(tuple),
    break_in=st.none() | st.integers(0, 2),
)
programs = st.builds(
    lambda parts, last: [*parts, *last],
    st.lists(loops | steps | epochs, min_size=1, max_size=3),
    st.lists(st.builds(ByHand, st.integers(0, 2), st.integers(1, 12)), max_size=1),
)
stops = st.lists(st.integers(1, 9), max_size=6)


@dataclass(frozen=True)
class Place:
    """Which replica a run is, and what fits into its memory.

    Attributes:
        pretended: The rank and the world size whose part of the batches this replica
            reads, while it is alone in its job.
    """

    pretended: tuple[int, int] | None = None
    max_local_batch_size: int | None = None


class Run:
    """Runs a program on real loaders; asks for a stop or dies in one of the batches.

    Args:
        stop_in: The global batch, counted from 1, of those delivered by this run.
        kind: What happens there: "stop", "crash", or "kill" of the last rank.
        draws: Whether to note what the program's generators draw.
        trains: Whether a model is trained, by two optimizers.

    Attributes:
        delivered: The real samples of each global batch, or this replica's part.
    """

    def __init__(
        self,
        program: Program,
        *,
        stop_in: int = -1,
        kind: str = "stop",
        place: Place = Place(),
        draws: bool = True,
        trains: bool = False,
    ) -> None:
        self._program = program
        self._stop_in = stop_in
        self._kind = kind
        self._place = place
        self._draws = draws
        self._trains = trains
        self._num_steps = 0
        self._depth = 0
        self._body: Batch = ()
        self._num_in_body = 0
        self.delivered: Delivered = []
        self.is_finished = False

    def __call__(self) -> None:
        self._loaders = self._made()
        self._taken = Variables(by_hand=0)
        if self._trains:
            self._model, self._optimizers = _model()
        seed_all(0)
        self._num_epochs = 0
        for part in self._program:
            self._part(part)
        self.is_finished = True

    @property
    def parameters(self) -> list[Tensor]:
        """What the model has become."""
        return [each.detach().clone() for each in self._model.module.parameters()]

    def _made(self) -> list[Any]:
        loader = self._loader
        lists: list[list[int]] = [[0], [1, 2, 1], [], [3, 4]]
        short = lists[1:3]
        return [
            loader("train", 7, 3),
            loader("extra", 7, 2, drop_last=True),
            loader("valid", 5, 2, shuffle=False),
            loader("probe", 3, 2),
            loader("planned", 7, {0: 2, 3: 1, 12: 4}),
            loader("listed", 7, batch_sampler=lists),
            CombinedLoader(
                {"x": loader("x", 9, 2), "y": loader("y", 5, 4, drop_last=True)},
                name="shortest",
            ),
            CombinedLoader(
                [loader("p", 8, {0: 3, 5: 1}), loader("q", 3, batch_sampler=short)],
                "max_size_cycle",
                name="cycled",
            ),
            CombinedLoader(
                [loader("v", 5, 2), loader("w", 2, 3)], "max_size_cycle", name="longest"
            ),
        ]

    def _loader(
        self,
        name: str,
        length: int,
        size: Any = 1,
        *,
        shuffle: bool = True,
        **given: Any,
    ) -> AdaptiveDataLoader:
        loader = AdaptiveDataLoader(
            Numbers(length),
            size,
            shuffle,
            name=name,
            max_local_batch_size=self._place.max_local_batch_size,
            **given,
        )
        if self._place.pretended is not None:
            most = self._place.max_local_batch_size
            loader.shares = BatchSplit(*self._place.pretended, most, is_padded=True)
        return loader

    def _part(self, part: Loop | Steps | Epochs | ByHand) -> None:
        if isinstance(part, Loop):
            self._loop(part)
        elif isinstance(part, Steps):
            self._steps(part)
        elif isinstance(part, ByHand):
            self._by_hand(part)
        else:
            self._epochs(part)

    def _epochs(self, part: Epochs) -> None:
        first, num_steps = self._num_epochs, self._num_steps
        self._num_epochs += part.num_epochs
        most = max([0, *(p.num_steps for p in part.loops if isinstance(p, Steps))])
        for epoch in remaining_epochs_until(self._num_epochs):
            # After a break, epochs have lower numbers than those asked for before.
            self._num_steps = num_steps + max(epoch - first, 0) * most
            for loop in part.loops:
                self._part(loop)
            if epoch == part.break_in:
                break
        self._num_steps = num_steps + part.num_epochs * most

    def _loop(self, loop: Loop) -> None:
        loader = self._loaders[loop.loader]
        source: Any = loader
        if loop.num_batches is not None:
            source = loader.batches(loop.num_batches)
        try:
            for batch in source:
                self._deliver(loader, batch, loop.rate)
                if not loader.is_step:
                    continue
                self._inner_loops(loop.inside)
                if loader.batch_index == loop.after:
                    if loop.ending == "break":
                        break
                    if loop.ending == "exception":
                        raise LookupError
        except LookupError:
            return

    def _inner_loops(self, loops: Iterable[Loop]) -> None:
        self._depth += 1
        try:
            for inner in loops:
                self._loop(inner)
        finally:
            self._depth -= 1

    def _steps(self, part: Steps) -> None:
        self._num_steps += part.num_steps
        for step in remaining_steps_until(self._num_steps):
            self._note(("step", step))
            self._add([])
            self._train({"step": None}, [torch.ones(2)])
            self._interrupt()
            self._inner_loops(part.inside)
            if step == part.break_in:
                break

    def _by_hand(self, part: ByHand) -> None:
        loader = self._loaders[part.loader]
        batches = iter(loader)
        while self._taken.by_hand < part.num_batches:
            try:
                batch = next(batches)
            except StopIteration:
                batches = iter(loader)
                batch = next(batches)
            self._taken.by_hand += loader.is_step
            self._deliver(loader, batch)

    def _deliver(self, loader: Any, batch: Any, rate: int = 1) -> None:
        if loader.is_first:
            numbers = (loader.batch_index, loader.finished_batches, loader.index)
            self._note((loader.name, *numbers))
        given = {loader: batch}
        if isinstance(loader, CombinedLoader):
            batches = batch.values() if isinstance(batch, dict) else batch
            given = dict(zip(loader._members.values(), batches, strict=True))
        for member, own in given.items():
            self._add(own.tolist()[: member.num_valid], of=member.name)
        self._train(given, list(given.values()), loader.batch_index, rate)
        if loader.is_step:
            self._interrupt()

    def _note(self, what: Batch) -> None:
        """Begin a global batch, or a step."""
        body = (current_epoch(), *current_job().progress.body)
        self._num_in_body = self._num_in_body + 1 if body == self._body else 0
        self._body = body
        key = (*body, self._num_in_body, *what)
        self.delivered.append((key, {}))
        if self._draws:
            self._add(list(draw_from_each()), of="draws")

    def _add(self, samples: list[float], of: str = "") -> None:
        self.delivered[-1][1].setdefault(of, []).extend(samples)

    def _interrupt(self) -> None:
        """Stop or die, if it is to be in this global batch."""
        if len(self.delivered) == self._stop_in:
            if self._kind == "crash":
                raise Crash
            if self._kind == "stop":
                request_stop()
            elif rank() == world_size() - 1:
                os.kill(os.getpid(), signal.SIGKILL)

    def _train(
        self,
        of: Mapping[Any, Any],
        batches: list[Tensor],
        number: int = 0,
        rate: int = 1,
    ) -> None:
        """Take a step, in a body that is in no other one.

        What a loop's last batches leave for the second optimizer is thrown away.
        """
        if not self._trains or self._depth:
            return
        inputs = [batch.double().view(-1, 1) / 10 for batch in batches]
        outputs = self._model(torch.cat(inputs)).split([len(x) for x in inputs])
        losses = [
            mse_loss(output, x)
            if len(batches) == 1
            else self._model.weigh(mse_loss(output, x), member=member)
            for member, output, x in zip(of, outputs, inputs, strict=True)
        ]
        fast, slow = self._optimizers
        fast.zero_grad()
        if number % rate == 0:
            slow.zero_grad()
        torch.stack(losses).sum().backward()
        fast.step()
        if number % rate == rate - 1:
            slow.step()


def _model() -> tuple[AdaptiveDataParallel, list[torch.optim.Optimizer]]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.SGD(net[0].parameters(), lr=0.1, momentum=0.9),
        torch.optim.Adam(net[2].parameters(), lr=0.01),
    ]
    return AdaptiveDataParallel(net, optimizers), optimizers
