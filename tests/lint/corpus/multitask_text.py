"""Three text classification tasks on one encoder, uncertainty weighting (Kendall et al.)."""
import random
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from elasticrun import AdaptiveDataLoader, AdaptiveDataParallel, Variables, device, rank, remaining_steps_until

TASKS = {"sentiment": 2, "topic": 14, "entailment": 3}
cfg = SimpleNamespace(steps=60_000, batch_size=64, eval_every=2000, lr=5e-4, vocab=32_000, seed=13)


class Encoded(torch.utils.data.Dataset):
    def __init__(self, name, split):
        data = np.load(f"data/{name}_{split}.npz")
        self.ids, self.labels = data["ids"], data["labels"]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return torch.from_numpy(self.ids[i]).long(), int(self.labels[i])


class MultiTask(nn.Module):
    def __init__(self, tasks, dim=256):
        super().__init__()
        self.embed = nn.Embedding(cfg.vocab, dim, padding_idx=0)
        layer = nn.TransformerEncoderLayer(dim, 4, 4 * dim, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4)
        self.heads = nn.ModuleDict({name: nn.Linear(dim, n) for name, n in tasks.items()})

    def forward(self, ids, task):
        mask = ids == 0
        h = self.encoder(self.embed(ids), src_key_padding_mask=mask)
        h = h.masked_fill(mask[..., None], 0).sum(1) / (~mask).sum(1, keepdim=True)
        return self.heads[task](h)


class Mean:
    """A little like torchmetrics.MeanMetric."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.total, self.weight = 0.0, 0

    def update(self, values):
        self.total += values.sum().item()  # MISTAKE: sum: the sum of this replica's share only (or line with: self.weight += len(values)) (or line with: metric.update(hits[) (or line with: return self.total / self.weight) (or line with: accuracies[task] = metric.compute())
        self.weight += len(values)

    def compute(self):
        return self.total / self.weight


def set_seed(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)  # ARGUABLE: all replicas draw the same dropout; the batches come from loaders


def endless(loader):
    while True:
        for batch in loader:
            yield batch


set_seed(cfg.seed)  # ARGUABLE: as above
train = {
    t: AdaptiveDataLoader(Encoded(t, "train"), batch_size=cfg.batch_size, shuffle=True, device=device(), name=f"train-{t}")
    for t in TASKS
}
valid = {t: AdaptiveDataLoader(Encoded(t, "valid"), batch_size=256, device=device(), name=f"valid-{t}") for t in TASKS}
net = MultiTask(TASKS).to(device())
log_vars = {t: nn.Parameter(torch.zeros((), device=device())) for t in TASKS}  # MISTAKE: unreg: these parameters are in no checkpoint, and no replica averages their gradients (or line with: optimizer = torch.optim.AdamW) (or line with: loss = (-log_vars[task]).exp())
optimizer = torch.optim.AdamW([*net.parameters(), *log_vars.values()], lr=cfg.lr)
warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 1000))
model = AdaptiveDataParallel(net, optimizer, warmup, find_unused_parameters=True)
best = Variables(mean=0.0, step=0)

iterators = {t: endless(train[t]) for t in TASKS}  # MISTAKE: loop: three loops that overlap, held over the steps (or line with: ids, labels = next(iterators[task])) (or line with: for batch in loader:)
sizes = [len(train[t].dataset) ** 0.5 for t in TASKS]
metric = Mean()
for step in remaining_steps_until(cfg.steps):
    model.train()
    task = random.choices(list(TASKS), sizes)[0]  # MISTAKE: rng: a replica that joined later has a generator of its own and draws another task
    ids, labels = next(iterators[task])
    loss = F.cross_entropy(model(ids, task), labels)
    loss = (-log_vars[task]).exp() * loss + log_vars[task]
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    warmup.step()

    if step and step % cfg.eval_every == 0:
        model.eval()
        accuracies = {}
        for task, loader in valid.items():
            metric.reset()
            for ids, labels in loader:
                with torch.no_grad():
                    hits = model(ids, task).argmax(1) == labels
                metric.update(hits[: loader.num_valid].float())
            accuracies[task] = metric.compute()
        mean = sum(accuracies.values()) / len(accuracies)
        if mean > best.mean:  # ARGUABLE: follows from the metric above
            best.mean, best.step = mean, step  # MISTAKE: vars: the accuracy of this replica's share (or line with: mean = sum(accuracies.values()))
        if rank() == 0:
            print(step, {k: f"{v:.3f}" for k, v in accuracies.items()}, f"best {best.mean:.3f} at {best.step}")
