"""A language model: a schedule by batch, some evaluations, a tracker with an id."""

import csv
import math
import os
from pathlib import Path

import torch
import wandb
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, get_cosine_schedule_with_warmup

import elasticrun
from elasticrun import (
    Accumulator,
    AdaptiveDataLoader,
    AdaptiveDataParallel,
    LogFile,
    Variables,
)

EPOCHS = 3
EVAL_EVERY = 2
OUT = Path("out")


def evaluate(model, loader):
    totals = Accumulator()
    model.eval()
    with torch.no_grad():
        for batch in tqdm(loader, desc="eval", disable=elasticrun.rank() != 0):
            totals["nll"] += model(**batch).loss.item() * loader.num_valid
            totals["count"] += loader.num_valid
    with totals.synchronized():
        return math.exp(totals["nll"] / totals["count"])


def main(train_set, valid_set):
    torch.manual_seed(42)
    OUT.mkdir(parents=True, exist_ok=True)
    model = AutoModelForCausalLM.from_pretrained("gpt2")
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
    train = AdaptiveDataLoader(train_set, batch_size=32, shuffle=True, seed=42)
    valid = AdaptiveDataLoader(valid_set, batch_size=64)
    total = EPOCHS * len(train)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 100, total)
    ddp = AdaptiveDataParallel(model, optimizer, scheduler)
    kept, seen = Variables(best=float("inf")), Accumulator()
    rows = csv.writer(LogFile(OUT / "metrics.csv"))
    if elasticrun.rank() == 0:
        wandb.init(project="lm", id=os.environ["RUN_NAME"], resume="allow")
    for epoch in elasticrun.remaining_epochs_until(EPOCHS):
        ddp.train()
        bar = tqdm(total=len(train), disable=elasticrun.rank() != 0)
        for step, batch in train.enumerate():
            loss = ddp(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            seen["tokens"] += batch["input_ids"][: train.num_valid].numel()
            bar.update(1)
            if step % 100 == 0 and elasticrun.rank() == 0:
                wandb.log({"loss": loss.item()}, step=epoch * len(train) + step)
        bar.close()
        if (epoch + 1) % EVAL_EVERY == 0:
            perplexity = evaluate(ddp, valid)
            kept.best = min(kept.best, perplexity)
            rows.writerow([epoch, perplexity, kept.best])
            if elasticrun.rank() == 0:
                model.save_pretrained(OUT / f"epoch-{epoch}")
