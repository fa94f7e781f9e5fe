"""From every boundary of every program, replay comes to the same place and goes on."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from elasticrun.checkpoint.position import Position
from elasticrun.errors import LoopOrderError
from elasticrun.job.progress import Progress


@dataclass(frozen=True)
class Loop:
    """A loop over one loader; how it ends: by itself, by break or by an exception."""

    loader: str
    num_batches: int
    ending: str


@dataclass(frozen=True)
class Epochs:
    """An epoch loop, perhaps left by `break` in one of its epochs."""

    num_epochs: int
    loops: tuple[Loop, ...]
    break_in: int | None = None


Program = list[Loop | Epochs]

BATCH_SIZE = 10

loops = st.builds(
    Loop,
    loader=st.sampled_from(["train", "valid"]),
    num_batches=st.integers(0, 3),
    ending=st.sampled_from(["end", "break", "exception"]),
)
programs = st.lists(
    loops
    | st.builds(Epochs, st.integers(0, 3), st.lists(loops, max_size=3).map(tuple)),
    max_size=4,
)

Step = tuple[str, int, int, int]  # Loader, finished epochs and loops, index before.


class Walk:
    """Runs a program on a Progress as the job does; records steps and boundaries."""

    def __init__(self, resume: Position | None = None) -> None:
        self.progress = Progress(resume)
        self.steps: list[Step] = []
        self.boundaries: list[tuple[int, Position]] = []  # Steps before it, and where.

    def run(self, program: Program) -> Walk:
        limit = 0
        for part in program:
            if isinstance(part, Loop):
                self._loop(part)
            else:
                limit += part.num_epochs
                self._epochs(part, limit)
        return self

    def _epochs(self, part: Epochs, limit: int) -> None:
        epoch = self.progress.skip_epochs(limit)
        while epoch < limit:
            self.progress.begin_epoch()
            for loop in part.loops:
                self._loop(loop)
            self.progress.end_epoch()
            if epoch == part.break_in:
                self.progress.end_epoch_loop(is_left=True)
                return
            self._pass_boundary()
            epoch = self.progress.finished_epochs
        self.progress.end_epoch_loop()

    def _loop(self, loop: Loop) -> None:
        start = self.progress.begin_loop(loop.loader)
        if start is None:
            return
        for batch in range(start.index // BATCH_SIZE, loop.num_batches):
            position = self.progress.position
            self.steps.append(
                (
                    loop.loader,
                    position.finished_epochs,
                    position.finished_loops,
                    position.index,
                )
            )
            is_last = batch == loop.num_batches - 1
            if loop.ending != "end" and is_last:
                self.progress.end_loop(is_finished=loop.ending == "break")
                return
            self.progress.index += BATCH_SIZE
            self._pass_boundary()
        self.progress.end_loop(is_finished=True)

    def _pass_boundary(self) -> None:
        self.boundaries.append((len(self.steps), self.progress.position))


def train(num_batches: int = 3, ending: str = "end") -> Loop:
    return Loop("train", num_batches, ending)


@given(program=programs)
@example([train(), Epochs(2, (train(), train())), train(2, "break")])
@example([Epochs(1, (train(2, "exception"), Loop("valid", 2, "end")))])
@example([Epochs(9, (train(),), break_in=1), train(), Epochs(2, (train(), train()))])
def test_every_boundary_can_be_resumed_from(program: Program) -> None:
    whole = Walk().run(program)
    for number, (num_steps, position) in enumerate(whole.boundaries):
        saved = Position.decode(position.encode())
        assert saved == position
        rest = Walk(saved).run(program)
        assert rest.steps == whole.steps[num_steps:]
        assert rest.progress.position == whole.progress.position
        later = [position for _, position in whole.boundaries[number + 1 :]]
        assert [position for _, position in rest.boundaries] == later


@given(program=programs)
def test_positions_only_go_forward(program: Program) -> None:
    places = [
        (*position.place, position.index)
        for _, position in Walk().run(program).boundaries
    ]
    assert places == sorted(places)


@given(program=programs)
def test_a_save_during_replay_is_where_the_program_resumes(program: Program) -> None:
    for _, position in Walk().run(program).boundaries:
        progress = Progress(position)
        assert progress.position == position
        progress.skip_epochs(0)
        assert progress.position == position
        assert progress.is_replaying


def enter_epoch(progress: Progress, number: int) -> None:
    assert progress.skip_epochs(number + 1) == number
    progress.begin_epoch()


def test_a_finished_loop_is_skipped_and_the_interrupted_one_continued() -> None:
    progress = Progress(Position(3, True, 1, 40, "valid"))
    enter_epoch(progress, 3)
    assert progress.begin_loop("train") is None
    assert progress.begin_loop("valid") == Position(3, True, 1, 40, "valid")
    assert not progress.is_replaying


def test_a_combined_loader_goes_on_where_older_positions_name_it() -> None:
    progress = Progress(Position(0, False, 0, 3, "both"))
    assert progress.next_index("steps of both") == 3
    position = progress.begin_loop("steps of both")
    assert str(position) == "loop 0 after 0 epochs, step 3 of `both`"


def test_a_later_epoch_loop_continues_the_numbering() -> None:
    progress = Progress(Position(5, False))
    assert progress.skip_epochs(3) == 3
    assert progress.begin_loop("test") is None
    assert progress.skip_epochs(8) == 5


def test_an_epoch_loop_that_was_left_is_not_entered_again() -> None:
    # Early stopping, and then a stop in the test loop that follows.
    progress = Progress(Position(2, False, 0, 40, "test", breaks=((0, 2),)))
    assert progress.skip_epochs(30) >= 30
    progress.end_epoch_loop()
    start = progress.begin_loop("test")
    assert start is not None
    assert start.index == 40
    assert progress.position.breaks == ((0, 2),)


def test_an_exception_through_an_epoch_lets_the_next_epoch_loop_continue_it() -> None:
    progress = Progress()
    enter_epoch(progress, 0)
    assert progress.begin_loop("train") is not None
    progress.end_loop(is_finished=True)
    assert progress.begin_loop("valid") is not None
    progress.index += 20
    progress.end_loop(is_finished=False)
    progress.leave_epoch()

    enter_epoch(progress, 0)
    assert progress.begin_loop("train") is None
    assert progress.begin_loop("valid") == Position(0, True, 1, 20, "valid")


def test_a_loop_after_an_epoch_that_raised_gives_that_epoch_up() -> None:
    progress = Progress()
    enter_epoch(progress, 0)
    progress.begin_loop("train")
    progress.index += 20
    progress.end_loop(is_finished=False)
    progress.leave_epoch()
    start = progress.begin_loop("test")
    assert start == Position(1, False, 0, 0, "test")
    progress.end_loop(is_finished=True)
    assert progress.skip_epochs(3) == 1


def test_another_loader_in_the_place_of_the_interrupted_one_is_refused() -> None:
    progress = Progress(Position(0, True, 0, 40, "train"))
    enter_epoch(progress, 0)
    with pytest.raises(
        LoopOrderError,
        match=r"stopped in epoch 0, loop 0, sample 40 of `train`, but now that loop is "
        r"over `valid`\. Samples would be skipped or seen twice\.",
    ):
        progress.begin_loop("valid")


def test_a_program_that_leaves_the_interrupted_loop_out_is_refused() -> None:
    progress = Progress(Position(0, True, 1, 40, "valid"))
    enter_epoch(progress, 0)
    progress.begin_loop("train")
    with pytest.raises(
        LoopOrderError,
        match=r"stopped in epoch 0, loop 1, sample 40 of `valid`, but the program went "
        r"on to the end of epoch 0 without that loop\. Samples would be lost\.",
    ):
        progress.end_epoch()
