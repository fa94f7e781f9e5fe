"""Trainings with the Trainer of transformers go on where they were."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytest.importorskip("transformers", reason="it needs CPython 3.11 or later")

import transformers
from accelerate import DistributedType
from accelerate.state import PartialState
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback

from elasticrun import (
    AdaptiveDataLoader,
    ElasticRunError,
    Endless,
    rank,
    world_size,
)
from elasticrun.integrations.transformers import ElasticMixin, ElasticTrainer
from elasticrun.integrations.transformers.batches import SharedBatches
from elasticrun.integrations.transformers.checks import (
    INTERNALS,
    INTERNALS_IN_TRAINING,
)
from elasticrun.testing import run_generation, start_generation
from tests.integrations.transformers.training import (
    NUM_BATCHES,
    NUM_EPOCHS,
    NUM_SAMPLES,
    Counting,
    Texts,
    Training,
    collate,
    net,
)
from tests.support.foreign import delivered, deliveries
from tests.support.forkservers import forks_that_have_imported
from tests.support.generations import JOB, Crash, run_once
from tests.support.programs import Leave, StopOnce, request_stop_and_wait
from tests.support.streams import Cut, Iterable
from tests.support.variants import in_wide

# It warns of deprecations of torch's, and of what a checkpoint leaves out.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

TIMEOUT = 600.0
EVERY_STEP = range(1, NUM_BATCHES * NUM_EPOCHS + 1)


def run(directory: Path, training: Training, **options: Any) -> Any:
    trace = str(directory / "trace")
    return run_once(training.run, directory, trace_dir=trace, **options)


@pytest.fixture(autouse=True)
def _handler_given_back() -> Iterator[None]:
    """Take back the handler of SIGTERM that a Trainer may leave for the next tests."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def trainer_in_forks() -> Iterator[None]:
    """Let replicas not import the Trainer each, which takes seconds."""
    with forks_that_have_imported("tests.integrations.transformers.training"):
        yield


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    directory = tmp_path_factory.mktemp("calm")
    ended = run(directory, Training(str(directory), dropout=0.1))
    return ended, delivered(directory / "trace")


@pytest.mark.parametrize(
    ("kind", "accumulated", "trainer"),
    [
        *[("tokens", 3, Counting), ("samples", 1, Trainer)],
        *in_wide(("tokens", 1, Trainer)),
        *in_wide(("samples", 3, Trainer)),
    ],
)
def test_one_replica_does_what_the_trainer_does(
    tmp_path: Path, kind: str, accumulated: int, trainer: Any
) -> None:
    options = {"gradient_accumulation_steps": accumulated}
    training = Training(str(tmp_path), kind=kind, trainer=trainer, options=options)
    ours = run(tmp_path, training)
    bare = replace(training, directory=str(tmp_path / "bare"))
    assert bare.run_bare(delivered(tmp_path / "trace")) == ours


@pytest.mark.parametrize("data", [*in_wide(Cut), Iterable])
def test_streams_are_trained_with_as_their_samples_are(
    tmp_path: Path, data: Any
) -> None:
    training = Training(str(tmp_path), data=data, options=STEPS)
    ours = run(tmp_path, training)
    batches = delivered(tmp_path / "trace")
    first = [batches[0, number] for number in range(NUM_BATCHES)]
    assert (first == sorted(first)) == (data is Iterable)  # Which is not shuffled.
    bare = Training(str(tmp_path / "bare"), options=STEPS)
    assert bare.run_bare(batches) == ours


def test_stops_do_not_show(tmp_path: Path, calm: Any) -> None:
    training = Training(str(tmp_path), dropout=0.1)
    for _ in EVERY_STEP:
        if run(tmp_path, replace(training, on_step=StopOnce())) is not None:
            break
    assert run(tmp_path, training) == calm[0]
    assert delivered(tmp_path / "trace") == calm[1]
    # A stop comes after the step in which it is asked for, or after the next one.
    assert len({generation for generation, _ in deliveries(tmp_path / "trace")}) >= 4


@pytest.mark.parametrize("died_in", [4, *in_wide(1, 5, 7)])
def test_kills_do_not_show(tmp_path: Path, calm: Any, died_in: int) -> None:
    def die(state: Any) -> None:
        if state.global_step == died_in:
            raise Crash

    training = Training(str(tmp_path), dropout=0.1)
    dying = replace(training, on_step=die)
    assert run(tmp_path, dying, save_interval=0) is None
    assert run(tmp_path, training) == calm[0]
    assert delivered(tmp_path / "trace") == calm[1]


@pytest.mark.parametrize(
    ("options", "left_after"),
    [
        ({"gradient_accumulation_steps": 3}, 2),
        *in_wide(({"gradient_accumulation_steps": 3}, 3)),
        ({"max_steps": 6, "lr_scheduler_type": "cosine"}, 4),
        ({"train_sampling_strategy": "group_by_length"}, 2),
    ],
)
def test_a_stop_does_not_show_with_other_arguments(
    tmp_path: Path, options: dict[str, Any], left_after: int
) -> None:
    def stop(state: Any) -> None:
        if state.global_step == left_after:
            request_stop_and_wait()

    training = Training(str(tmp_path), options=options)
    calm = run(tmp_path / "calm", replace(training, directory=str(tmp_path / "calm")))
    assert run(tmp_path, replace(training, on_step=stop)) is None
    assert run(tmp_path, training) == calm
    assert delivered(tmp_path / "trace") == delivered(tmp_path / "calm" / "trace")


def test_a_training_that_has_ended_stays_so(tmp_path: Path) -> None:
    directory, options = str(tmp_path / "steps"), {"max_steps": 6, "logging_steps": 4}
    by_steps = Training(directory, trainer=Counting, options=options)
    by_callback = Training(str(tmp_path / "early"), patience=0)
    for training, num_steps in ((by_steps, 6), (by_callback, 2)):
        job = Path(training.directory)
        ended = run(job, training)
        assert ended["steps"] == num_steps
        batches = deliveries(job / "trace")
        assert run(job, training) == ended
        assert deliveries(job / "trace") == batches


def test_another_epoch_can_be_added(tmp_path: Path) -> None:
    short = Training(str(tmp_path), options={"num_train_epochs": 1})
    assert run(tmp_path, short)["steps"] == NUM_BATCHES
    assert run(tmp_path, Training(str(tmp_path)))["steps"] == 2 * NUM_BATCHES


def test_lengths_are_grouped(tmp_path: Path) -> None:
    options = {"train_sampling_strategy": "group_by_length"}
    run(tmp_path, Training(str(tmp_path), options=options))
    texts = Texts(NUM_SAMPLES).texts
    spread = [
        max(lengths) - min(lengths)
        for batch in delivered(tmp_path / "trace").values()
        for lengths in [[len(texts[index]) for index in batch]]
    ]
    assert max(spread[:3]) <= 3


def die_in_last_step(state: Any) -> None:
    if state.global_step == state.max_steps and rank() == world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)


# Which the Trainer asks for where data has no length.
STEPS = {"max_steps": NUM_BATCHES * NUM_EPOCHS}
# The last batch would be padded, which a descendant counts.
FULL = {"dataloader_drop_last": True, "logging_steps": 4}


@pytest.mark.usefixtures("trainer_in_forks")
@pytest.mark.parametrize(
    ("changes", "died_at", "ended_at"),
    [
        ({"kind": "tokens", "num_devices": 5}, 2, 1),
        *in_wide(({"kind": "samples"}, 3, 1)),
        *in_wide(({"trainer": Counting, "options": FULL}, 2, 2)),
        *in_wide(({"data": Cut}, 2, 3)),
        ({"data": Iterable, "options": STEPS}, 3, 1),
    ],
)
def test_a_stop_and_a_kill_at_1_to_3_replicas_do_not_show(
    tmp_path: Path, changes: dict[str, Any], died_at: int, ended_at: int
) -> None:
    job = tmp_path / "job"
    training = replace(Training(str(job)), **changes)
    alone = replace(training, directory=str(tmp_path / "calm"), num_devices=1)
    calm = run(tmp_path / "calm", alone)
    assert run(job, replace(training, on_step=StopOnce())) is None
    dying = replace(training, on_step=die_in_last_step, save_interval=0)
    variables = {"ELASTICRUN_TRACE": str(job / "trace"), "ELASTICRUN_JOB": JOB}
    with start_generation(dying, died_at, variables=variables) as started:
        outcomes = started.wait(timeout=TIMEOUT)
    assert outcomes[-1].exit_code == -signal.SIGKILL
    ended, *_ = run_generation(training, ended_at, timeout=TIMEOUT, variables=variables)
    assert_alike(ended, calm)
    assert delivered(job / "trace") == delivered(tmp_path / "calm" / "trace")


@pytest.mark.soak
@pytest.mark.usefixtures("trainer_in_forks")
@pytest.mark.parametrize("seed", range(8))
def test_stops_and_kills_at_random_do_not_show(tmp_path: Path, seed: int) -> None:
    random = Random(seed)
    kind, num_devices = random.choice(["tokens", "samples"]), random.choice([1, 5])
    options = {"gradient_accumulation_steps": random.choice([1, 1, 3])}
    calm = Training(str(tmp_path / "calm"), kind=kind, options=options)
    expected = run(tmp_path / "calm", calm)
    job = tmp_path / "job"
    training = replace(calm, directory=str(job), num_devices=num_devices)
    variables = {"ELASTICRUN_TRACE": str(job / "trace"), "ELASTICRUN_JOB": JOB}
    for _ in range(6):
        leave = Leave(random.choice(["stop", "kill"]), random.randint(1, 3))
        leaving = replace(training, on_step=leave, save_interval=0)
        num_replicas = random.randint(1, 3)
        with start_generation(leaving, num_replicas, variables=variables) as started:
            started.wait(timeout=TIMEOUT)
    assert_alike(run(job, training), expected)
    assert delivered(job / "trace") == delivered(tmp_path / "calm" / "trace")


def assert_alike(ended: Any, calm: Any) -> None:
    """Compare two results to rounding, which differs between numbers of replicas."""
    assert len(ended["log"]) == len(calm["log"])
    for line, expected in zip(ended.pop("log"), calm.pop("log"), strict=True):
        # What is summed up over places has the rounding of all samples.
        assert line == pytest.approx(expected, rel=1e-5, abs=2e-4)
    for name, expected in calm.items():
        assert ended[name] == pytest.approx(expected, rel=1e-5, abs=2e-5), name


@pytest.mark.parametrize("num_samples", [1, 7, 12])
@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_an_evaluation_counts_each_sample_once(
    num_samples: int, world_size: int
) -> None:
    batches = [SharedBatches(num_samples, 4, r, world_size) for r in range(world_size)]
    counted = [
        index
        for number in range(len(batches[0]))
        for share in batches[0].shares(number)
        for index in share
    ]
    assert counted == list(range(num_samples))
    for each in batches:  # All come to each gathering.
        assert len(list(each)) == len(each) == len(batches[0])
        assert all(list(each))


class Forgets(TrainerCallback):
    """Lets a Trainer lack an attribute, as another version might."""

    def __init__(self, trainer: Any, name: str) -> None:
        self._trainer = trainer
        self._name = name

    def on_train_begin(self, *args: Any, **_: Any) -> None:
        delattr(self._trainer, self._name)


def make(directory: Path, kind: Any = ElasticTrainer, **options: Any) -> Any:
    """Return a small Trainer of this kind."""
    texts = Texts(7)
    given = {"train_dataset": texts, "eval_dataset": texts, "data_collator": collate}
    arguments = Training(str(directory), options=options.pop("options", {})).arguments()
    return kind(model=net("samples", 0.0), args=arguments, **(given | options))


@pytest.mark.parametrize("path", INTERNALS.split())
def test_what_transformers_has_no_more_is_named(
    job: Any, monkeypatch: pytest.MonkeyPatch, path: str, tmp_path: Path
) -> None:
    owner, _, name = path.partition(".")
    monkeypatch.delattr(getattr(transformers, owner), name)
    with pytest.raises(ElasticRunError, match=f" has no {path}, which"):
        make(tmp_path)


@pytest.mark.parametrize("name", INTERNALS_IN_TRAINING.split())
def test_what_a_trainer_that_trains_has_no_more_is_named(
    job: Any, name: str, tmp_path: Path
) -> None:
    trainer = make(tmp_path)
    trainer.add_callback(Forgets(trainer, name))
    with pytest.raises(ElasticRunError, match=f"Trainer of .* has no {name}, which"):
        trainer.train()


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"average_tokens_across_devices": False}, "average_tokens_across_devices"),
        ({"batch_eval_metrics": True}, "batch_eval_metrics"),
        ({"enable_jit_checkpoint": True}, "enable_jit_checkpoint"),
        ({"eval_on_start": True}, "eval_on_start"),
        ({"ignore_data_skip": True}, "ignore_data_skip"),
        ({"accelerator_config": {"split_batches": True}}, "split_batches"),
    ],
)
def test_arguments_are_refused(
    job: Any, tmp_path: Path, options: dict[str, Any], what: str
) -> None:
    with pytest.raises(ElasticRunError, match=f"does not support {what}"):
        make(tmp_path, options=options)


def test_other_processes_and_parallelism_are_refused(
    job: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options = {"eval_strategy": "no", "load_best_model_at_end": False}
    arguments = Training(str(tmp_path), options=options).arguments()
    assert arguments.device.type == "cpu"  # Now what they share is made.
    shared = PartialState._shared_state
    monkeypatch.setitem(shared, "num_processes", 2)
    with pytest.raises(ElasticRunError, match="2 processes, but the job 1 replicas"):
        ElasticTrainer(model=net("samples", 0.0), args=arguments)
    monkeypatch.setitem(shared, "distributed_type", DistributedType.MEGATRON_LM)
    with pytest.raises(ElasticRunError, match="support training by MEGATRON_LM"):
        ElasticTrainer(model=net("samples", 0.0), args=arguments)


class OwnLoader(ElasticTrainer):
    def get_train_dataloader(self) -> Any:
        return DataLoader(self.train_dataset, collate_fn=collate)


class OwnLoaderOfOurs(ElasticTrainer):
    def get_train_dataloader(self) -> Any:
        return AdaptiveDataLoader(self.train_dataset, 3, collate_fn=collate)


class OwnEvaluation(ElasticTrainer):
    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return DataLoader(self.eval_dataset, collate_fn=collate)


def test_what_cannot_go_on_is_refused(job: Any, tmp_path: Path) -> None:
    endless = Endless(Cut(Texts(7)))
    with pytest.raises(TypeError, match="Training: a Endless has no length"):
        make(tmp_path, train_dataset=endless, options=STEPS).train()
    with pytest.raises(TypeError, match="Evaluation: a Endless has no length"):
        make(tmp_path, eval_dataset=endless).evaluate()
    with pytest.raises(TypeError, match=r"get_train_dataloader\(\) returned a DataL"):
        make(tmp_path, OwnLoader).train()
    with pytest.raises(TypeError, match="an evaluation got a DataLoader of its own"):
        make(tmp_path, OwnEvaluation).evaluate()
    with pytest.raises(ElasticRunError, match="resume_from_checkpoint"):
        make(tmp_path).train(resume_from_checkpoint=True)
    rebalanced = {"train_sampling_strategy": "batch_rebalance"}
    with pytest.raises(ElasticRunError, match="sampler is a BatchRebalanceSampler"):
        make(tmp_path, options=rebalanced).train()
    with pytest.raises(ValueError, match="num_devices=0"):
        make(tmp_path, num_devices=0)


class Descendant(Trainer):
    """As libraries on top of the Trainer have them; it looks at each loss."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        result = super().compute_loss(*args, **kwargs)
        self.num_losses = getattr(self, "num_losses", 0) + 1
        return result


class ElasticDescendant(ElasticMixin, Descendant):
    pass


def test_a_descendant_trains_once_with_a_loader_of_ones_own(
    job: Any, tmp_path: Path
) -> None:
    trainer = make(tmp_path, ElasticDescendant, num_devices=2)
    trainer.train()
    assert trainer.num_losses > trainer.state.global_step == 2
    with pytest.raises(ElasticRunError, match="a second time"):
        trainer.train()


class MixinLast(Descendant, ElasticMixin):
    pass


def test_a_mixin_behind_a_trainer_is_refused(job: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"class MixinLast\(ElasticMixin, Descendant\)"):
        make(tmp_path, MixinLast)


def test_a_loader_of_ours_is_taken(job: Any, tmp_path: Path) -> None:
    trainer = make(tmp_path, OwnLoaderOfOurs)
    trainer.train()
    assert trainer.state.global_step == 3 * NUM_EPOCHS
