"""Train a small GPT-2 with the Trainer of transformers, through any restarts.

    python examples/trainer_gpt2.py --checkpoint-dir /tmp/t
    elasticrun run --replicas 4 --checkpoint-dir /tmp/t examples/trainer_gpt2.py

The model is made from a configuration and guesses characters of Python's own source, so
nothing is downloaded. What differs from a script without elasticrun: `ElasticTrainer`,
and for how many devices the batch sizes are meant.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch
from text import CONTEXT, NUM_CHARACTERS, read_text
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PrinterCallback,
    TrainerCallback,
    TrainingArguments,
)

import elasticrun
from elasticrun.integrations.transformers import ElasticTrainer


class Stretches(Dataset[dict[str, Tensor]]):
    """Stretches of a text, in which each character is to be guessed from those before.

    They differ in length, as sentences do; what is missing at an end counts in no loss.
    """

    def __init__(self, text: Tensor) -> None:
        self.texts = text[: len(text) // CONTEXT * CONTEXT].view(-1, CONTEXT)

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        text = self.texts[index]
        labels = text.clone()
        labels[CONTEXT - index % 32 :] = -100
        return {"input_ids": text, "labels": labels}


class Printed(TrainerCallback):
    """Prints each evaluation."""

    def on_evaluate(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        bits = others["metrics"]["eval_loss"] / math.log(2)
        if state.is_world_process_zero:
            print(f"step {state.global_step:5}  held out {bits:5.2f} bits", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--eval-every", type=int, default=100)
    parser.add_argument("--num-bytes", type=int, default=2_000_000, help="of source")
    parser.add_argument("--checkpoint-dir", help="where the job goes on from")
    given = parser.parse_args()

    torch.set_num_threads(1)  # several replicas may share the machine
    torch.manual_seed(0)
    elasticrun.init(given.checkpoint_dir)
    text = read_text(given.num_bytes)
    cut = len(text) * 19 // 20
    config = GPT2Config(
        vocab_size=NUM_CHARACTERS,
        n_positions=CONTEXT,
        n_embd=64,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    arguments = TrainingArguments(
        output_dir="trainer",
        max_steps=given.steps,
        per_device_train_batch_size=8,  # and of four devices 32, at any number
        per_device_eval_batch_size=64,
        learning_rate=5e-3,
        lr_scheduler_type="cosine",
        eval_strategy="steps",
        eval_steps=given.eval_every,
        save_strategy="no",  # the job has checkpoints of its own
        report_to=[],
        disable_tqdm=True,
        use_cpu=elasticrun.device().type == "cpu",
    )
    trainer = ElasticTrainer(
        model=GPT2LMHeadModel(config),
        args=arguments,
        train_dataset=Stretches(text[:cut]),
        eval_dataset=Stretches(text[cut:]),
        callbacks=[Printed()],
        num_devices=4,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()


if __name__ == "__main__":
    main()
