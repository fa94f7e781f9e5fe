"""Causal language model, no Trainer, ported; counted in batches."""
import argparse
import math
import os
from itertools import chain

import torch
from datasets import load_dataset
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, default_data_collator, get_scheduler

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, LogFile, Variables, device, rank


def group_texts(examples, block=512):
    joined = {k: list(chain(*examples[k])) for k in examples}
    total = len(joined["input_ids"]) // block * block
    result = {k: [v[i : i + block] for i in range(0, total, block)] for k, v in joined.items()}
    result["labels"] = result["input_ids"].copy()
    return result


def evaluate(net, loader, dev):
    net.eval()
    total = Accumulator(name="eval")
    with torch.no_grad():
        for batch in loader:
            loss = net(**{k: v.to(dev) for k, v in batch.items()}).loss
            total["loss"] += loss.item() * loader.num_valid
    with total.synchronized():
        mean = total["loss"] / loader.num_samples
        total.clear()
    return math.exp(mean)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--model", default="gpt2")
    p.add_argument("--batch_size", type=int, default=16)
    p.add_argument("--max_train_steps", type=int, default=5000)
    p.add_argument("--warmup", type=int, default=200)
    p.add_argument("--out", default="clm")
    args = p.parse_args()
    torch.manual_seed(0)
    dev = device()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    raw = load_dataset("wikitext", "wikitext-2-raw-v1")
    tokens = raw.map(lambda e: tokenizer(e["text"]), batched=True, remove_columns=["text"])
    data = tokens.map(group_texts, batched=True)
    train = AdaptiveDataLoader(data["train"], batch_size=args.batch_size, shuffle=True, collate_fn=default_data_collator, max_local_batch_size=4)
    valid = AdaptiveDataLoader(data["validation"], batch_size=16, collate_fn=default_data_collator)
    net = AutoModelForCausalLM.from_pretrained(args.model).to(dev)
    optimizer = torch.optim.AdamW(net.parameters(), lr=5e-5)
    scheduler = get_scheduler("cosine", optimizer, args.warmup, args.max_train_steps)
    model = AdaptiveDataParallel(net, optimizer, scheduler)
    log = LogFile(os.path.join("clm-log.tsv"))
    best = Variables(perplexity=float("inf"))
    bar = tqdm(total=args.max_train_steps, initial=train.finished_batches, disable=rank() != 0)
    model.train()
    for batch in train.batches(args.max_train_steps):
        batch = {k: v.to(dev) for k, v in batch.items()}
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if not train.is_step:
            continue
        bar.update(1)
        if train.batch_index % 100 == 0:
            log.write(f"{train.batch_index}\t{loss.item():.4f}\n")
    perplexity = evaluate(net, valid, dev)
    best.perplexity = min(best.perplexity, perplexity)
    if rank() == 0:
        os.makedirs(args.out, exist_ok=True)
        net.save_pretrained(args.out)
        print(f"perplexity {best.perplexity:.2f}")


if __name__ == "__main__":
    main()
