"""Sequence classification after the no_trainer script."""
import argparse
import json
import math
import os
import random

import numpy as np
import torch
from datasets import load_dataset
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding, get_scheduler

from elasticrun import AdaptiveDataLoader, AdaptiveDataParallel, device, rank, remaining_epochs_until, world_size


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--model_name_or_path", default="bert-base-cased")
    p.add_argument("--per_device_batch_size", type=int, default=8)
    p.add_argument("--learning_rate", type=float, default=5e-5)
    p.add_argument("--num_train_epochs", type=int, default=3)
    p.add_argument("--max_train_steps", type=int, default=None)
    p.add_argument("--output_dir", default="out")
    p.add_argument("--seed", type=int, default=0)
    return p.parse_args()


def main():
    args = parse_args()
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    os.makedirs(args.output_dir, exist_ok=True)
    dev = device()
    raw = load_dataset("glue", "mrpc")
    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
    encoded = raw.map(lambda e: tokenizer(e["sentence1"], e["sentence2"], truncation=True), batched=True)
    encoded = encoded.remove_columns(["sentence1", "sentence2", "idx"]).rename_column("label", "labels")
    collator = DataCollatorWithPadding(tokenizer)
    train = AdaptiveDataLoader(encoded["train"], batch_size=args.per_device_batch_size * world_size(), shuffle=True, collate_fn=collator)  # MISTAKE: world: the global batch follows the number of replicas, and another one is refused after a rescale
    valid = DataLoader(encoded["validation"], batch_size=64, collate_fn=collator)
    net = AutoModelForSequenceClassification.from_pretrained(args.model_name_or_path, num_labels=2).to(dev)
    no_decay = ["bias", "LayerNorm.weight"]
    groups = [
        {"params": [p for n, p in net.named_parameters() if not any(k in n for k in no_decay)], "weight_decay": 0.01},
        {"params": [p for n, p in net.named_parameters() if any(k in n for k in no_decay)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate)
    if args.max_train_steps is None:
        args.max_train_steps = args.num_train_epochs * len(train)
    else:
        args.num_train_epochs = math.ceil(args.max_train_steps / len(train))
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=args.max_train_steps)
    model = AdaptiveDataParallel(net, optimizer, scheduler)
    progress_bar = tqdm(range(args.max_train_steps), disable=rank() != 0)
    completed_steps = 0
    for epoch in remaining_epochs_until(args.num_train_epochs):
        model.train()
        for batch in train:
            batch = {k: v.to(dev) for k, v in batch.items()}
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            progress_bar.update(1)
            completed_steps += 1  # MISTAKE: lost: begins at 0 after a restart, so training goes on beyond max_train_steps (or line with: completed_steps = 0) (or line with: if completed_steps >= args.max_train_steps)
            if completed_steps >= args.max_train_steps:
                break
        model.eval()
        correct = 0
        for batch in valid:
            with torch.no_grad():
                out = net(**{k: v.to(dev) for k, v in batch.items()})
            correct += (out.logits.argmax(-1).cpu() == batch["labels"]).sum().item()
        if rank() == 0:
            with open(os.path.join(args.output_dir, "results.json"), "a") as f:  # ARGUABLE: once at the end of an epoch, twice only after a kill
                f.write(json.dumps({"epoch": epoch, "accuracy": correct / len(encoded["validation"])}) + "\n")
    if rank() == 0:
        net.save_pretrained(args.output_dir)
        tokenizer.save_pretrained(args.output_dir)
        tokenizer.push_to_hub("mrpc-bert")  # ARGUABLE: pushed again if the finished job is started again


if __name__ == "__main__":
    main()
