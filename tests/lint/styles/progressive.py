"""Three phases with other data and sizes; each an epoch loop to a larger total."""
import torch
from torch import nn

import elasticrun
from elasticrun import AdaptiveDataLoader, Accumulator, AdaptiveDataParallel

PHASES = [(32, 256, 10), (64, 128, 20), (128, 64, 30)]


def loaders_for(size, batch):
    from mydata import Images
    train = AdaptiveDataLoader(Images("train", size), batch, shuffle=True, name=f"train{size}")
    test = AdaptiveDataLoader(Images("test", size), batch, name=f"test{size}", even_batches=False)
    return train, test


def run():
    elasticrun.init()
    torch.manual_seed(11)
    net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    model = AdaptiveDataParallel(net, opt)
    score = Accumulator()
    done = 0
    for size, batch, until in PHASES:
        train, test = loaders_for(size, batch)
        for epoch in elasticrun.remaining_epochs_until(until):
            for group in opt.param_groups:
                group["lr"] = 0.1 * 0.5 ** ((epoch - done) // 3)
            for x, y in train:
                opt.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                opt.step()
            for x, y in test:
                with torch.no_grad():
                    score["right"] += (model(x).argmax(1) == y)[:test.num_valid].sum()
                score["all"] += test.num_valid
            with score.synchronized():
                print(size, epoch, score["right"] / score["all"])
                score.clear()
        done = until


run()
