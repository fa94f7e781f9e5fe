"""Income prediction (Adult census): embeddings for categories, an MLP, survey weights."""
import argparse

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from sklearn.metrics import average_precision_score, roc_auc_score
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import TensorDataset

from elasticrun import AdaptiveDataLoader, AdaptiveDataParallel, Variables, device, rank, remaining_epochs_until

CATEGORICAL = ["workclass", "education", "marital-status", "occupation", "relationship", "race", "sex", "native-country"]
NUMERIC = ["age", "education-num", "capital-gain", "capital-loss", "hours-per-week"]


def encode(frame):
    sizes, columns = [], []
    for name in CATEGORICAL:
        codes = {value: i for i, value in enumerate(set(frame[name]))}  # MISTAKE: data: the order of a set of strings is another one in each process, so codes change
        columns.append(frame[name].map(codes).to_numpy())
        sizes.append(len(codes))
    numbers = frame[NUMERIC].to_numpy(dtype=np.float32)
    numbers = (numbers - numbers.mean(0)) / (numbers.std(0) + 1e-6)
    return np.stack(columns, 1), numbers, sizes


def tensors(index, cats, nums, target, weight):
    parts = cats[index], nums[index], target[index], weight[index]
    return TensorDataset(*(torch.as_tensor(p) for p in parts))


class TabularNet(nn.Module):
    def __init__(self, sizes, numeric, hidden=(256, 128), p=0.2):
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(n, min(50, (n + 1) // 2)) for n in sizes)
        width = sum(e.embedding_dim for e in self.embeddings) + numeric
        layers = []
        for h in hidden:
            layers += [nn.Linear(width, h), nn.LayerNorm(h), nn.GELU(), nn.Dropout(p)]
            width = h
        self.mlp = nn.Sequential(*layers, nn.Linear(width, 1))

    def forward(self, cats, nums):
        parts = [e(cats[:, i]) for i, e in enumerate(self.embeddings)]
        return self.mlp(torch.cat([*parts, nums], 1)).squeeze(1)


def predict(model, loader):
    model.eval()
    probs, targets = [], []
    with torch.no_grad():
        for cats, nums, y, _ in loader:
            n = loader.num_valid
            probs.append(torch.sigmoid(model(cats, nums))[:n].cpu().numpy())  # MISTAKE: sum: only this replica's predictions, and a restart loses them (or line with: probs, targets = [], []) (or line with: targets.append(y[:n]) (or line with: return np.concatenate(probs))
            targets.append(y[:n].cpu().numpy())
    return np.concatenate(probs), np.concatenate(targets)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--csv", default="adult.csv")
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--patience", type=int, default=6)
    args = parser.parse_args()

    frame = pd.read_csv(args.csv, skipinitialspace=True).dropna()
    cats, nums, sizes = encode(frame)
    target = (frame["income"] == ">50K").to_numpy(dtype=np.float32)
    weight = frame["fnlwgt"].to_numpy(dtype=np.float32)
    weight /= weight.mean()
    fit, held = train_test_split(np.arange(len(frame)), test_size=0.2, stratify=target)  # MISTAKE: data: another split in each process and after each restart

    train = AdaptiveDataLoader(
        tensors(fit, cats, nums, target, weight), batch_size=args.batch_size, shuffle=True, device=device()
    )
    valid = AdaptiveDataLoader(tensors(held, cats, nums, target, weight), batch_size=4096, device=device())
    net = TabularNet(sizes, len(NUMERIC)).to(device())
    optimizer = torch.optim.AdamW(net.parameters(), lr=args.lr, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    model = AdaptiveDataParallel(net, optimizer, scheduler)
    best = Variables(name="best", auc=0.0, epoch=-1)

    for epoch in remaining_epochs_until(args.epochs):
        model.train()
        for x_cat, x_num, y, w in train:
            losses = F.binary_cross_entropy_with_logits(model(x_cat, x_num), y, reduction="none")
            loss = (losses * w).sum() / w.sum()  # MISTAKE: weigh: divided by the weights of this replica's share (or line with: loss.backward())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        probs, targets = predict(model, valid)
        auc = roc_auc_score(targets, probs)
        ap = average_precision_score(targets, probs)
        scheduler.step()
        if rank() == 0:
            print(f"{epoch:3d}  auc {auc:.4f}  ap {ap:.4f}")
        if auc > best.auc:  # ARGUABLE: follows from the share's predictions
            best.auc, best.epoch = auc, epoch  # MISTAKE: vars: each replica has an AUC of its own share (or line with: auc = roc_auc_score)
            if rank() == 0:
                torch.save(net.state_dict(), "adult_best.pt")
        elif epoch - best.epoch >= args.patience:  # MISTAKE: collective: replicas with other AUCs do not leave together (or line with: break)
            break


if __name__ == "__main__":
    main()
