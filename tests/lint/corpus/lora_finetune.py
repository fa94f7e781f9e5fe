"""Fine-tunes a causal LM on instructions with LoRA written by hand. Was a torchrun script."""
import argparse
import json
import math
import os

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from elasticrun import AdaptiveDataLoader, AdaptiveDataParallel, device, init, rank, remaining_epochs_until


class LoRALinear(nn.Module):
    def __init__(self, base, r=8, alpha=16):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(r, base.in_features) / math.sqrt(r))
        self.b = nn.Parameter(torch.zeros(base.out_features, r))
        self.scale = alpha / r

    def forward(self, x):
        return self.base(x) + (x @ self.a.t() @ self.b.t()) * self.scale


def inject(net, targets):
    for name, module in list(net.named_modules()):
        for child_name, child in list(module.named_children()):
            if child_name in targets and isinstance(child, nn.Linear):
                setattr(module, child_name, LoRALinear(child))
    return net


class Instructions(torch.utils.data.Dataset):
    def __init__(self, path, tokenizer, max_len):
        with open(path) as f:
            self.rows = [json.loads(line) for line in f]
        self.tokenizer, self.max_len = tokenizer, max_len

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        row = self.rows[i]
        prompt = self.tokenizer(row["instruction"] + "\n").input_ids
        answer = self.tokenizer(row["output"]).input_ids + [self.tokenizer.eos_token_id]
        ids = (prompt + answer)[: self.max_len]
        labels = ([-100] * len(prompt) + answer)[: self.max_len]
        return torch.tensor(ids), torch.tensor(labels)


def collate(pairs):
    ids, labels = zip(*pairs)
    ids = nn.utils.rnn.pad_sequence(ids, batch_first=True)
    labels = nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)
    return ids, labels


def evaluate(model, loader):
    model.eval()
    losses = []
    with torch.no_grad():
        for ids, labels in loader:
            losses.append(model(input_ids=ids, labels=labels).loss.item())  # MISTAKE: sum: the losses of this replica's share, lost by a restart (or line with: losses = []) (or line with: return math.exp(sum(losses))
    model.train()
    return math.exp(sum(losses) / len(losses))


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--model", default="facebook/opt-1.3b")
    p.add_argument("--data", default="alpaca")
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--batch-size", type=int, default=8)
    p.add_argument("--grad-accum", type=int, default=8)
    p.add_argument("--lr", type=float, default=2e-4)
    p.add_argument("--warmup", type=int, default=100)
    p.add_argument("--output", default="lora_out")
    p.add_argument("--resume", default=None)
    args = p.parse_args()

    init(save_interval=120)
    os.makedirs(args.output, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    net = AutoModelForCausalLM.from_pretrained(args.model, torch_dtype=torch.bfloat16).requires_grad_(False)
    net = inject(net, {"q_proj", "v_proj"}).to(device())
    trainable = [q for q in net.parameters() if q.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=args.lr)
    model = AdaptiveDataParallel(net, optimizer)

    if args.resume:
        state = torch.load(args.resume, map_location=device())
        net.load_state_dict(state["lora"], strict=False)  # MISTAKE: leftover: puts the old weights over those of the checkpoint at each start (or line with: optimizer.load_state_dict(state) (or line with: state = torch.load(args.resume) (or line with: if args.resume:)
        optimizer.load_state_dict(state["optimizer"])

    options = dict(batch_size=args.batch_size, collate_fn=collate, device=device())
    train = AdaptiveDataLoader(Instructions(f"{args.data}/train.jsonl", tokenizer, 512), shuffle=True, **options)
    valid = AdaptiveDataLoader(Instructions(f"{args.data}/valid.jsonl", tokenizer, 512), **options)
    global_step = 0
    for epoch in remaining_epochs_until(args.epochs):
        model.train()
        for i, (ids, labels) in enumerate(train):  # MISTAKE: enum: counts from 0 again after a restart, and decides when to step (or line with: if (i + 1) % args.grad_accum)
            loss = model(input_ids=ids, labels=labels).loss  # MISTAKE: weigh: a mean over the answer's tokens of this replica's share (or line with: (loss / args.grad_accum).backward())
            (loss / args.grad_accum).backward()  # MISTAKE: cut: accumulates over batches by hand (or line with: if (i + 1) % args.grad_accum)
            if (i + 1) % args.grad_accum == 0:
                global_step += 1  # MISTAKE: lost: is 0 again after a restart, so the warm-up begins again (or line with: global_step = 0) (or line with: group["lr"] = args.lr * min)
                for group in optimizer.param_groups:
                    group["lr"] = args.lr * min(1.0, global_step / args.warmup)
                nn.utils.clip_grad_norm_(trainable, 1.0)
                optimizer.step()
                optimizer.zero_grad()
                if global_step % 10 == 0 and rank() == 0:
                    print(f"epoch {epoch} step {global_step} loss {loss.item():.4f}")  # ARGUABLE: the loss of rank 0's share, only printed
        perplexity = evaluate(model, valid)
        if rank() == 0:
            lora = {k: v for k, v in net.state_dict().items() if k.endswith((".a", ".b"))}
            torch.save({"lora": lora, "optimizer": optimizer.state_dict()}, f"{args.output}/epoch{epoch}.pt")  # ARGUABLE: a former checkpoint, which is not needed to go on
            print(f"epoch {epoch}: perplexity {perplexity:.2f}")


if __name__ == "__main__":
    main()
