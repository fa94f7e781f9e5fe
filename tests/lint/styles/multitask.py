"""Multi-task: one loop per task, shared trunk, uncertainty weights."""
from typing import Dict

import torch
from torch import nn
from torch.utils.tensorboard import SummaryWriter

import elasticrun as er


class MultiTask(nn.Module):
    def __init__(self, tasks: Dict[str, int]):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(64, 128), nn.ReLU())
        self.heads = nn.ModuleDict({t: nn.Linear(128, n) for t, n in tasks.items()})
        self.log_vars = nn.ParameterDict({t: nn.Parameter(torch.zeros(())) for t in tasks})

    def forward(self, x, task):
        return self.heads[task](self.trunk(x))


def loss_for(task):
    return nn.MSELoss() if task == "depth" else nn.CrossEntropyLoss()


def main(sets, valid_sets):
    er.init()
    torch.manual_seed(1)
    tasks = {"depth": 1, "seg": 12, "normals": 3}
    net = MultiTask(tasks)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    model = er.AdaptiveDataParallel(net, optimizer, scheduler, find_unused_parameters=True)
    train = {t: er.AdaptiveDataLoader(sets[t], 64, shuffle=True, name=f"train-{t}") for t in tasks}
    valid = {t: er.AdaptiveDataLoader(valid_sets[t], 64, even_batches=False, name=f"val-{t}") for t in tasks}
    criteria = {t: loss_for(t) for t in tasks}
    sums = er.Accumulator()
    best = er.Variables(total=float("inf"), per_task={t: float("inf") for t in tasks})
    writer = SummaryWriter("runs/mt") if er.rank() == 0 else None

    for epoch in er.remaining_epochs_until(40):
        net.train()
        for task, loader in train.items():
            for x, y in loader:
                optimizer.zero_grad()
                raw = criteria[task](model(x, task), y)
                weighted = torch.exp(-net.log_vars[task]) * raw + net.log_vars[task]
                weighted.backward()
                optimizer.step()
        net.eval()
        for task in tasks:
            for x, y in valid[task]:
                with torch.no_grad():
                    sums[task] += criteria[task](model(x, task), y).item() * len(x)
                    sums[task + "/n"] += len(x)
        with sums.synchronized():
            means = {t: sums[t] / sums[t + "/n"] for t in tasks}
            sums.clear()
        total = sum(means.values())
        for task, value in means.items():
            if value < best.per_task[task]:
                best.per_task[task] = value
            if writer is not None:
                writer.add_scalar(f"val/{task}", value, epoch)
        if total < best.total:
            best.total = total
            if er.rank() == 0:
                torch.save(net.state_dict(), "best.pt")
        scheduler.step()
