"""Everything in closures: make_step, make_eval; nonlocal counters live in Variables."""
import functools
import time

import click
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Adam
from torch.optim.lr_scheduler import LinearLR, SequentialLR, CosineAnnealingLR

import elasticrun as el


def timed(fn):
    @functools.wraps(fn)
    def wrapper(*args, **kwargs):
        start = time.perf_counter()
        try:
            return fn(*args, **kwargs)
        finally:
            print(f"{fn.__name__}: {time.perf_counter() - start:.2f}s")
    return wrapper


def make_training(net, lr, epochs):
    opt = Adam(net.parameters(), lr)
    warm = LinearLR(opt, 0.1, total_iters=3)
    cool = CosineAnnealingLR(opt, epochs - 3)
    sched = SequentialLR(opt, [warm, cool], milestones=[3])
    model = el.AdaptiveDataParallel(net, opt, sched)
    log = el.Variables(name="log", lines=[])

    def step(x, y):
        opt.zero_grad()
        loss = F.nll_loss(model(x).log_softmax(-1), y)
        loss.backward()
        opt.step()
        return loss.detach()

    @timed
    def train_epoch(loader):
        model.train()
        for i, (x, y) in loader.enumerate():
            loss = step(x, y)
            if i % 100 == 0:
                print(i, float(loss))

    @timed
    @torch.no_grad()
    def test(loader, acc):
        model.eval()
        for x, y in loader:
            good = model(x).argmax(-1).eq(y)[: loader.num_valid]
            acc["good"] += good.sum().item()
        with acc.synchronized():
            rate = acc["good"] / loader.num_samples
            acc.clear()
        return rate

    def finish(epoch, rate):
        sched.step()
        log.lines.append((epoch, rate))

    return train_epoch, test, finish


@click.command()
@click.option("--epochs", default=12)
@click.option("--lr", default=1e-3)
@click.option("--batch", default=64)
def cli(epochs, lr, batch):
    torch.manual_seed(7)
    el.init()
    from torchvision import datasets, transforms as T
    tf = T.Compose([T.ToTensor(), T.Normalize((0.1307,), (0.3081,))])
    train = el.AdaptiveDataLoader(datasets.MNIST("data", train=True, download=True, transform=tf), batch, True)
    test_loader = el.AdaptiveDataLoader(datasets.MNIST("data", train=False, transform=tf), 1000)
    net = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    train_epoch, test, finish = make_training(net, lr, epochs)
    acc = el.Accumulator()
    for epoch in el.remaining_epochs_until(epochs):
        train_epoch(train)
        rate = test(test_loader, acc)
        finish(epoch, rate)
    if el.rank() == 0:
        torch.save(net.state_dict(), "mnist_cnn.pt")


if __name__ == "__main__":
    cli()
