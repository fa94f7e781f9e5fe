"""A Trainer of transformers with evaluation, a best model, a schedule and callbacks."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from elasticrun import init
from elasticrun.integrations.transformers import ElasticMixin
from tests.support.foreign import Batches, Listed

NUM_SAMPLES, BATCH_SIZE, NUM_EPOCHS = 16, 5, 2
NUM_BATCHES = 4  # In an epoch: of 5, 5, 5 and 1 samples.
NUM_WORDS, CONTEXT = 11, 8

Sample = dict[str, list[int]]


def nothing(trainer: Any) -> None:
    """Let the step be."""


class Texts(Dataset[Sample]):
    """Texts of different lengths, so that batches differ in their tokens."""

    def __init__(self, num_samples: int) -> None:
        random = np.random.default_rng(3)
        lengths = random.integers(2, CONTEXT + 1, num_samples)
        self.texts = [random.integers(NUM_WORDS, size=n).tolist() for n in lengths]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> Sample:
        return {"input_ids": self.texts[index]}


def unchanged(data: Texts) -> Texts:
    return data


def collate(samples: list[Sample]) -> dict[str, Tensor]:
    """Pad to one length everywhere; what is padded counts in no loss."""
    inputs = torch.zeros(len(samples), CONTEXT, dtype=torch.int64)
    labels = torch.full_like(inputs, -100)
    for row, sample in enumerate(samples):
        text = torch.tensor(sample["input_ids"])
        inputs[row, : len(text)] = labels[row, : len(text)] = text
    return {"input_ids": inputs, "labels": labels}


class MeanOverSamples(nn.Module):
    """A net whose loss is a mean over samples, and is told of no number of items."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(NUM_WORDS, 3)
        self.net = nn.Linear(3 * CONTEXT, 1)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(self.words(input_ids).flatten(1)).squeeze(1)
        target = (labels > 5).sum(1).float()
        return {"loss": nn.functional.mse_loss(logits, target), "logits": logits}


def net(kind: str, dropout: float) -> nn.Module:
    torch.manual_seed(1)
    if kind == "samples":
        return MeanOverSamples()
    config = GPT2Config(
        vocab_size=NUM_WORDS,
        n_positions=CONTEXT,
        n_embd=8,
        n_layer=1,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        attn_pdrop=dropout,
        embd_pdrop=dropout,
        resid_pdrop=dropout,
    )
    return GPT2LMHeadModel(config)


class Counting(Trainer):
    """A descendant that counts as those of TRL do.

    It logs means since its last log, over the samples of all devices, and its
    evaluation does not say how many tokens a loss is a mean over.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._metrics: Any = {"train": defaultdict(list), "eval": defaultdict(list)}
        self._total_train_tokens = 0

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, **others: Any
    ) -> Any:
        metrics = self._metrics["train" if self.model.training else "eval"]
        of_each = inputs["labels"].ne(-100).sum(1)
        tokens = self.accelerator.gather_for_metrics(of_each).float()
        metrics["tokens"].append(tokens.mean().item())
        if self.model.training:
            num_tokens = self.accelerator.gather_for_metrics(of_each.sum()).sum()
            self._total_train_tokens += int(num_tokens)
        metrics["num_tokens"] = [self._total_train_tokens]
        return super().compute_loss(model, inputs, return_outputs, **others)

    def prediction_step(
        self, model: Any, inputs: Any, *args: Any, **others: Any
    ) -> Any:
        with torch.no_grad():
            loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
        return loss, outputs.logits, inputs["labels"]

    def log(self, logs: dict[str, Any], *args: Any) -> None:
        kind = "train" if self.model.training else "eval"
        means = {name: sum(m) / len(m) for name, m in self._metrics[kind].items()}
        super().log(
            logs | {f"{kind}_{name}": mean for name, mean in means.items()}, *args
        )
        self._metrics[kind].clear()


class OnStep(TrainerCallback):
    """Calls a function with the Trainer's state at the end of each step."""

    def __init__(self, function: Callable[[Any], None]) -> None:
        self._function = function

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._function(state)


def first_of_each(predicted: Any) -> dict[str, float]:
    """Return metrics that a sample counted twice, or in another place, changes."""
    first = np.asarray(predicted.predictions).reshape(len(predicted.label_ids), -1)[
        :, 0
    ]
    places = np.arange(1, len(first) + 1)
    return {"sum": float(first.sum()), "places": float((first * places).sum())}


@dataclass
class Training:
    """One training.

    Attributes:
        on_step: Called at the end of each step, before the evaluation after it.
        kind: Of the net, by what its loss is a mean over: "tokens" or "samples".
        num_devices: How many the batch size is shared out to; a divisor of it.
        trainer: What becomes elastic.
        data: What is made of the data to train with and to evaluate.
        options: Arguments of the Trainer's.
    """

    directory: str
    on_step: Callable[[Any], None] = nothing
    save_interval: float | str = "off"
    kind: str = "tokens"
    dropout: float = 0.0
    num_devices: int = 1
    patience: int = 9
    trainer: type[Trainer] = Trainer
    data: Callable[[Texts], Any] = unchanged
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self) -> dict[str, Any]:
        """Run in a replica of its own."""
        init(self.directory, save_interval=self.save_interval, async_save=False)
        return self.run()

    def run(self) -> dict[str, Any]:
        elastic = type("Elastic", (ElasticMixin, self.trainer), {})
        return self._train(elastic, num_devices=self.num_devices)

    def run_bare(self, batches: Batches) -> dict[str, Any]:
        """Train with these batches and without elasticrun."""

        class Bare(self.trainer):
            def get_train_dataloader(self) -> Any:
                return DataLoader(
                    self.train_dataset,
                    batch_sampler=Listed(batches),
                    collate_fn=collate,
                )

        return self._train(Bare)

    def _train(self, kind: Any, **options: Any) -> dict[str, Any]:
        torch.set_num_threads(1)
        logging.getLogger("transformers").setLevel(logging.ERROR)
        early = EarlyStoppingCallback(self.patience)
        data = self.data(Texts(NUM_SAMPLES))
        trainer = kind(
            model=net(self.kind, self.dropout),
            args=self.arguments(),
            data_collator=collate,
            train_dataset=data,
            eval_dataset=self.data(Texts(17)),
            compute_metrics=first_of_each,
            callbacks=[early, OnStep(self.on_step)],
            **options,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        after = trainer.predict(self.data(Texts(7))).metrics
        state = trainer.state
        values = [each.detach().flatten() for each in trainer.model.parameters()]
        return {
            "parameters": torch.cat(values).tolist(),
            "log": [without_time(line) for line in state.log_history],
            "after": without_time(after),
            "best": (state.best_metric, state.best_global_step),
            "waited": early.early_stopping_patience_counter,
            "steps": state.global_step,
            "epoch": state.epoch,
            "tokens": state.num_input_tokens_seen,
            "operations": state.total_flos,
        }

    def arguments(self) -> TrainingArguments:
        given = {
            "output_dir": f"{self.directory}/hf",
            "num_train_epochs": NUM_EPOCHS,
            "per_device_train_batch_size": BATCH_SIZE // self.num_devices,
            "per_device_eval_batch_size": BATCH_SIZE // self.num_devices,
            "learning_rate": 0.1,
            "adam_epsilon": 1e-3,  # Else noise in a gradient of 0 is a step as any.
            "lr_scheduler_type": "linear",
            "logging_steps": 3,
            "eval_strategy": "steps",
            "eval_steps": 2,
            "save_strategy": "steps",
            "save_steps": 2,
            "save_only_model": True,
            "load_best_model_at_end": True,
            "metric_for_best_model": "loss",
            "include_num_input_tokens_seen": "all",
            "use_cpu": True,
            "disable_tqdm": True,
            "report_to": [],
            "remove_unused_columns": False,
            "dataloader_pin_memory": False,
        }
        return TrainingArguments(**(given | self.options))


def without_time(line: dict[str, Any]) -> dict[str, Any]:
    """Return what was logged but for what the machine's speed decides."""
    timed = ("_runtime", "_per_second", "_preparation_time")
    return {name: value for name, value in line.items() if not name.endswith(timed)}
