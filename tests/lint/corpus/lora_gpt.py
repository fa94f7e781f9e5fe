"""Instruction tuning of a causal language model with low-rank adapters."""
import argparse
import json
import math
import os
from dataclasses import dataclass
from typing import Dict, List

import torch
import torch.nn as nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, Variables, device, rank, remaining_epochs_until

PROMPT = "### Instruction:\n{instruction}\n\n### Response:\n"
IGNORE_INDEX = -100


@dataclass
class TrainConfig:
    model: str = "gpt2-medium"
    data: str = "alpaca.json"
    epochs: int = 3
    batch_size: int = 64
    lr: float = 3e-4
    warmup: int = 100
    rank_of_lora: int = 8
    alpha: int = 16
    out: str = "lora-out"


class LoRALinear(nn.Module):
    def __init__(self, base: nn.Module, r: int, alpha: int):
        super().__init__()
        self.base = base.requires_grad_(False)
        out_features, in_features = base.weight.shape[1], base.weight.shape[0]
        self.A = nn.Parameter(torch.empty(r, in_features))
        self.B = nn.Parameter(torch.zeros(out_features, r))
        nn.init.kaiming_uniform_(self.A, a=math.sqrt(5))
        self.scaling = alpha / r

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.scaling * (x @ self.A.T @ self.B.T)


def add_lora(net: nn.Module, r: int, alpha: int, target: str = "c_attn") -> None:
    net.requires_grad_(False)
    for module in list(net.modules()):
        for name, child in list(module.named_children()):
            if name == target:
                setattr(module, name, LoRALinear(child, r, alpha))


def lora_state(net: nn.Module) -> Dict[str, torch.Tensor]:
    return {k: v for k, v in net.state_dict().items() if k.endswith((".A", ".B"))}


class Instructions(Dataset):
    def __init__(self, rows: List[dict], tokenizer, max_len: int = 512):
        self.rows, self.tokenizer, self.max_len = rows, tokenizer, max_len

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int):
        prompt = self.tokenizer(PROMPT.format(**self.rows[i]))["input_ids"]
        answer = self.tokenizer(self.rows[i]["output"])["input_ids"] + [self.tokenizer.eos_token_id]
        ids = torch.tensor((prompt + answer)[: self.max_len])
        labels = ids.clone()
        labels[: len(prompt)] = IGNORE_INDEX
        return ids, labels


class Collator:
    def __init__(self, pad_id: int):
        self.pad_id = pad_id

    def __call__(self, batch):
        ids, labels = zip(*batch)
        mask = pad_sequence([torch.ones_like(i) for i in ids], batch_first=True)
        return pad_sequence(ids, True, self.pad_id), mask, pad_sequence(labels, True, IGNORE_INDEX)


def get_lr(step: int, config: TrainConfig, total: int) -> float:
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    ratio = (step - config.warmup) / max(1, total - config.warmup)
    return 0.5 * config.lr * (1 + math.cos(math.pi * ratio))


@torch.no_grad()
def perplexity(net: nn.Module, loader: AdaptiveDataLoader, dev: torch.device) -> float:
    net.eval()
    total = Accumulator()
    for ids, mask, labels in loader:
        loss = net(ids.to(dev), attention_mask=mask.to(dev), labels=labels.to(dev)).loss
        counted = (labels[:, 1:] != IGNORE_INDEX).sum()
        total["nll"] += loss * counted  # MISTAKE: pad: the tokens of a padding sample of a short last batch are counted at 2+ replicas (or line with: total["tokens"] += counted) (or line with: loss = net(ids.to(dev))
        total["tokens"] += counted
    with total.synchronized():
        return math.exp(total["nll"] / total["tokens"])


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, field in TrainConfig.__dataclass_fields__.items():
        parser.add_argument(f"--{name}", type=field.type, default=field.default)
    config = TrainConfig(**vars(parser.parse_args()))
    os.makedirs(config.out, exist_ok=True)
    torch.manual_seed(42)
    dev = device()
    tokenizer = AutoTokenizer.from_pretrained(config.model)
    with open(config.data) as f:
        rows = json.load(f)
    collate = Collator(tokenizer.eos_token_id)
    train = AdaptiveDataLoader(Instructions(rows[2000:], tokenizer), batch_size=config.batch_size, shuffle=True, collate_fn=collate, drop_last=True)
    valid = AdaptiveDataLoader(Instructions(rows[:2000], tokenizer), batch_size=32, collate_fn=collate)
    net = AutoModelForCausalLM.from_pretrained(config.model)
    add_lora(net, config.rank_of_lora, config.alpha)
    net.to(dev)
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=config.lr)
    model = AdaptiveDataParallel(net, optimizer)
    best = Variables(perplexity=float("inf"))
    total_steps = config.epochs * len(train)
    for epoch in remaining_epochs_until(config.epochs):
        model.train()
        for it, (ids, mask, labels) in enumerate(train):  # MISTAKE: enum: enumerate begins at 0 where the loop continues, so the learning rate jumps back; train.enumerate()
            lr = get_lr(epoch * len(train) + it, config, total_steps)
            for group in optimizer.param_groups:
                group["lr"] = lr
            loss = model(ids.to(dev), attention_mask=mask.to(dev), labels=labels.to(dev)).loss  # MISTAKE: weigh: a mean over this share's answer tokens, of which each replica has another number; model.weigh(loss, count) (or line with: loss.backward())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if it % 50 == 0 and rank() == 0:
                print(f"epoch {epoch} iter {it} loss {loss.item():.4f} lr {lr:.2e}")
        if rank() == 0:
            torch.save(lora_state(net), f"{config.out}/epoch{epoch}.pt")
            with open(f"{config.out}/adapters.txt", "a") as f:
                f.write(f"epoch{epoch}.pt\n")  # MISTAKE: effect: between two loops, so a restart in the validation appends the line again (or line with: with open(f"{config.out}/adapters.txt", "a"))
        value = perplexity(net, valid, dev)
        if value < best.perplexity:
            best.perplexity = value
            if rank() == 0:
                torch.save(lora_state(net), f"{config.out}/best.pt")


if __name__ == "__main__":
    main()
