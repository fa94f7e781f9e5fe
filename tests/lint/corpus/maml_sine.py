"""MAML for few-shot regression of sine waves, with torch.func."""
import argparse
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from elasticrun import AdaptiveDataParallel, Variables, device, rank, remaining_steps_until


class SineTasks:
    def __init__(self, shots, seed):
        self.shots = shots
        self.rng = np.random.RandomState(seed)  # MISTAKE: rng: each replica draws the same tasks, and a restart begins them again (or line with: train_tasks = SineTasks(args.shots) (or line with: amplitude = self.rng.uniform) (or line with: x = self.rng.uniform) (or line with: train_tasks.sample(args.meta_batch))

    def sample(self, n):
        amplitude = self.rng.uniform(0.1, 5.0, (n, 1, 1))
        phase = self.rng.uniform(0, math.pi, (n, 1, 1))
        x = self.rng.uniform(-5, 5, (n, 2 * self.shots, 1))
        y = amplitude * np.sin(x - phase)
        x, y = (torch.as_tensor(v, dtype=torch.float32, device=device()) for v in (x, y))
        return x[:, : self.shots], y[:, : self.shots], x[:, self.shots :], y[:, self.shots :]


class MAML(nn.Module):
    def __init__(self, learner, inner_lr, inner_steps):
        super().__init__()
        self.learner, self.inner_lr, self.inner_steps = learner, inner_lr, inner_steps

    def adapt(self, x, y, create_graph):
        params = dict(self.learner.named_parameters())
        for _ in range(self.inner_steps):
            loss = F.mse_loss(functional_call(self.learner, params, (x,)), y)
            grads = torch.autograd.grad(loss, list(params.values()), create_graph=create_graph)
            params = {k: p - self.inner_lr * g for (k, p), g in zip(params.items(), grads)}
        return params

    def forward(self, xs, ys, xq, yq):
        losses = []
        for task in zip(xs, ys, xq, yq):
            x, y, q, t = task
            params = self.adapt(x, y, create_graph=self.training)
            losses.append(F.mse_loss(functional_call(self.learner, params, (q,)), t))
        return torch.stack(losses)


def learner(width=40):
    return nn.Sequential(nn.Linear(1, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--iterations", type=int, default=70_000)
    p.add_argument("--meta-batch", type=int, default=25)
    p.add_argument("--shots", type=int, default=10)
    p.add_argument("--inner-lr", type=float, default=0.01)
    p.add_argument("--inner-steps", type=int, default=1)
    p.add_argument("--meta-lr", type=float, default=1e-3)
    p.add_argument("--report", default="maml_results.txt")
    args = p.parse_args()

    train_tasks = SineTasks(args.shots, seed=0)
    test_tasks = SineTasks(args.shots, seed=12345).sample(600)
    net = MAML(learner(), args.inner_lr, args.inner_steps).to(device())
    optimizer = torch.optim.Adam(net.parameters(), lr=args.meta_lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.iterations)
    meta = AdaptiveDataParallel(net, optimizer, schedule)
    best = Variables(loss=float("inf"), step=-1)

    smooth = None
    for step in remaining_steps_until(args.iterations):
        meta.train()
        loss = meta(*train_tasks.sample(args.meta_batch)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        smooth = loss.item() if smooth is None else 0.99 * smooth + 0.01 * loss.item()  # MISTAKE: lost: the running mean begins anew after a restart (or line with: smooth = None) (or line with: train {smooth:.3f})
        if step % 1000 == 999:
            net.eval()
            test = net(*test_tasks).mean().item()  # the same tasks on every replica
            if test < best.loss:
                best.loss, best.step = test, step
                if rank() == 0:
                    torch.save(net.learner.state_dict(), "maml_best.pt")
            if rank() == 0:
                print(f"{step + 1:6d}  train {smooth:.3f}  test {test:.3f}")

    with open(args.report, "a") as f:  # MISTAKE: everyrank: each replica adds the same line (or line with: f.write(f"shots)
        f.write(f"shots {args.shots} inner {args.inner_steps}: {best.loss:.4f} at {best.step}\n")


if __name__ == "__main__":
    main()
