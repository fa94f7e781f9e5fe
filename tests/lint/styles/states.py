"""States of one's own, and a stop that is remembered."""

import json
import random

import numpy as np
import torch

from elasticrun import (
    AdaptiveDataLoader,
    AdaptiveDataParallel,
    State,
    generation,
    remaining_epochs_until,
)


class EarlyStopping(State):
    def __init__(self, patience=5):
        super().__init__("early_stopping")
        self.patience = patience
        self.best = None
        self.bad_epochs = 0
        self.should_stop = False

    def save(self, fileobj):
        fields = [self.best, self.bad_epochs, self.should_stop]
        fileobj.write(json.dumps(fields).encode())

    def load(self, fileobj):
        self.best, self.bad_epochs, self.should_stop = json.loads(fileobj.read())

    def step(self, value):
        if self.best is None or value < self.best:
            self.best = value
            self.bad_epochs = 0
        else:
            self.bad_epochs += 1
        self.should_stop = self.bad_epochs >= self.patience


class Confusion(State):
    def __init__(self, num_classes):
        super().__init__("confusion")
        self.matrix = torch.zeros(num_classes, num_classes)

    def save(self, fileobj):
        torch.save(self.matrix, fileobj)

    def load(self, fileobj):
        self.matrix = torch.load(fileobj)

    def add(self, target, prediction):
        for t, p in zip(target, prediction, strict=True):
            self.matrix[t, p] += 1

    def reset(self):
        self.matrix.zero_()


def seed_everything(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def run(config, train_set, valid_set):
    seed_everything(config.seed)
    if generation() == 0:
        print("first start with", config)
    net = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=config.lr)
    model = AdaptiveDataParallel(net, optimizer)
    train = AdaptiveDataLoader(train_set, batch_size=config.batch_size, shuffle=True)
    valid = AdaptiveDataLoader(valid_set, batch_size=config.batch_size)
    stopper, confusion = EarlyStopping(), Confusion(3)
    for epoch in remaining_epochs_until(config.epochs):
        if stopper.should_stop:
            break
        for x, y in train:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        for x, y in valid:
            confusion.add(y, model(x).argmax(1))
        error = 1 - confusion.matrix.trace() / confusion.matrix.sum()
        confusion.reset()
        stopper.step(float(error))
        print(epoch, float(error))
