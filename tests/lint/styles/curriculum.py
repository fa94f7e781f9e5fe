"""A warm-up, then the rest, then a test: three kinds of loops in a row."""

import torch
from torch import nn

import elasticrun
from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel

WARMUP, TOTAL = 2, 20


def train_epoch(model, loader, optimizer):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def main(easy_set, full_set, test_set):
    torch.manual_seed(0)
    net = nn.Linear(5, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    model = AdaptiveDataParallel(net, optimizer)
    order = torch.multinomial(
        torch.ones(len(easy_set)), 100, generator=torch.Generator().manual_seed(1)
    )
    easy = AdaptiveDataLoader(easy_set, batch_size=16, sampler=order)
    full = AdaptiveDataLoader(full_set, batch_size=64, shuffle=True)
    test = AdaptiveDataLoader(test_set, batch_size=64)
    result = Accumulator()
    for _ in elasticrun.remaining_epochs_until(WARMUP):
        train_epoch(model, easy, optimizer)
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    for epoch in elasticrun.remaining_epochs_until(TOTAL):
        if epoch >= 15:
            for group in optimizer.param_groups:
                group["lr"] = 0.01
        try:
            train_epoch(model, full, optimizer)
        except RuntimeError as error:
            if "out of memory" in str(error):
                torch.cuda.empty_cache()
            raise
    model.eval()
    for x, y in test:
        with torch.no_grad():
            result["correct"] += (model(x).argmax(1) == y)[: test.num_valid].sum()
    with result.synchronized():
        print(f"test accuracy {result['correct'] / test.num_samples:.2%}")
