"""Trainers of TRL go on where they were. TRL is not installed for the tests.

`pip install trl` brings 220 MB, most of them pyarrow, and this runs.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="it is heavy, and not among the requirements")

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

from elasticrun import ElasticRunError, init, rank, world_size
from elasticrun.integrations.transformers import ElasticMixin
from elasticrun.testing import start_generation
from tests.integrations.test_transformers import assert_alike
from tests.integrations.transformers.training import OnStep, nothing, without_time
from tests.support.foreign import delivered
from tests.support.generations import JOB, run_once
from tests.support.programs import StopOnce

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

TEXT = (os.__doc__ or "").replace("\n", " ").split()
NUM_STEPS = 6  # In two epochs: batches of 5 samples of 15.
KINDS = {
    "sft": (SFTConfig, SFTTrainer),
    "dpo": (DPOConfig, DPOTrainer),
    "reward": (RewardConfig, RewardTrainer),
}


@dataclass
class Tuning:
    """One training of a kind, with evaluations."""

    directory: str
    kind: str
    on_step: Callable[[Any], None] = nothing
    save_interval: float | str = "off"

    def __call__(self) -> dict[str, Any]:
        """Run in a replica of its own."""
        init(self.directory, save_interval=self.save_interval, async_save=False)
        return self.run()

    def run(self) -> dict[str, Any]:
        torch.set_num_threads(1)
        config, kind = KINDS[self.kind]
        arguments = config(
            f"{self.directory}/hf",
            num_train_epochs=2,
            per_device_train_batch_size=5,
            per_device_eval_batch_size=5,
            learning_rate=0.05,
            adam_epsilon=1e-3,
            logging_steps=4,
            eval_strategy="steps",
            eval_steps=2,
            save_strategy="no",
            bf16=False,
            use_cpu=True,
            disable_tqdm=True,
            report_to=[],
        )
        elastic = type("Elastic", (ElasticMixin, kind), {})
        trainer: Any = elastic(
            model=net(self.kind),
            args=arguments,
            train_dataset=data(self.kind, 15),
            eval_dataset=data(self.kind, 17),
            processing_class=tokenizer(),
            callbacks=[OnStep(self.on_step)],
            **({"ref_model": net(self.kind)} if self.kind == "dpo" else {}),
        )
        trainer.train()
        values = [each.detach().flatten() for each in trainer.model.parameters()]
        return {
            "parameters": torch.cat(values).tolist(),
            "log": [without_means(line) for line in trainer.state.log_history],
        }


def without_means(line: dict[str, Any]) -> dict[str, Any]:
    """Return what was logged but for what depends on the number of devices in TRL."""
    by_devices = ("total_flos", "accuracy", "margin", "eval_accuracy", "eval_margin")
    logged = without_time(line).items()
    return {name: value for name, value in logged if name not in by_devices}


def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<eos>", *sorted(set(TEXT))]
    numbers = {word: number for number, word in enumerate(words)}
    made = Tokenizer(models.WordLevel(numbers, unk_token="<eos>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>"
    )


def net(kind: str) -> Any:
    torch.manual_seed(1)
    made = GPT2ForSequenceClassification if kind == "reward" else GPT2LMHeadModel
    config = GPT2Config(
        vocab_size=2 + len(set(TEXT)),
        n_positions=32,
        n_embd=8,
        n_layer=1,
        n_head=2,
        bos_token_id=1,
        eos_token_id=1,
        pad_token_id=0,
        num_labels=1,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
    )
    return made(config)


def data(kind: str, num_samples: int) -> Dataset:
    texts = [TEXT[start : start + 3 + start % 7] for start in range(num_samples)]
    if kind == "sft":
        return Dataset.from_dict({"text": [" ".join(text) for text in texts]})
    return Dataset.from_dict(
        {
            "prompt": [text[0] for text in texts],
            "chosen": [" " + " ".join(text[1:]) for text in texts],
            "rejected": [" " + " ".join(reversed(text)) for text in texts],
        }
    )


def run(directory: Path, tuning: Tuning) -> Any:
    return run_once(tuning.run, directory, trace_dir=str(directory / "trace"))


@pytest.mark.parametrize("kind", KINDS)
def test_stops_do_not_show(tmp_path: Path, kind: str) -> None:
    calm = run(tmp_path / "calm", Tuning(str(tmp_path / "calm"), kind))
    tuning = Tuning(str(tmp_path / "job"), kind)
    for _ in range(NUM_STEPS):
        if run(tmp_path / "job", replace(tuning, on_step=StopOnce())) is not None:
            break
    assert run(tmp_path / "job", tuning) == calm


def die_in_fifth_step(state: Any) -> None:
    if state.global_step == NUM_STEPS - 1 and rank() == world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_and_a_kill_at_1_2_1_replicas_do_not_show(
    tmp_path: Path, kind: str
) -> None:
    calm = run(tmp_path / "calm", Tuning(str(tmp_path / "calm"), kind))
    job = tmp_path / "job"
    tuning = Tuning(str(job), kind)
    assert run(job, replace(tuning, on_step=StopOnce())) is None
    dying = replace(tuning, on_step=die_in_fifth_step, save_interval=0)
    variables = {"ELASTICRUN_TRACE": str(job / "trace"), "ELASTICRUN_JOB": JOB}
    with start_generation(dying, 2, variables=variables) as started:
        outcomes = started.wait(timeout=600)
    assert outcomes[-1].exit_code == -signal.SIGKILL
    assert_alike(run(job, tuning), calm)
    assert delivered(job / "trace") == delivered(tmp_path / "calm" / "trace")


def test_a_trainer_that_samples_its_own_data_is_refused(
    job: Any, tmp_path: Path
) -> None:
    elastic = type("Elastic", (ElasticMixin, GRPOTrainer), {})
    trainer: Any = elastic(
        model=net("sft"),
        args=GRPOConfig(
            str(tmp_path), num_generations=2, bf16=False, use_cpu=True, report_to=[]
        ),
        train_dataset=data("dpo", 4).select_columns(["prompt"]),
        reward_funcs=[lambda completions, **_: [0.0] * len(completions)],
        processing_class=tokenizer(),
    )
    with pytest.raises(ElasticRunError, match="sampler is a RepeatSampler"):
        trainer.train()
