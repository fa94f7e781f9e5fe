"""An engine of generators: batches() moves to the device, epochs() logs around."""
import contextlib
import csv
import itertools
import logging
import os

import torch
from torch import nn

from elasticrun import (
    Accumulator,
    LogFile,
    AdaptiveDataLoader as Loader,
    AdaptiveDataParallel as Parallel,
    Variables,
    init,
    rank,
    register,
    remaining_epochs_until,
)

logger = logging.getLogger("engine")


def batches(loader, device, desc):
    """Yield batches on the device, with a log line now and then."""
    for index, batch in loader.enumerate():
        if index % 10 == 0:
            logger.debug("%s: %d of %d", desc, index, len(loader))
        yield {key: value.to(device, non_blocking=True) for key, value in batch.items()}


def epochs(total):
    for epoch in remaining_epochs_until(total):
        logger.info("epoch %d begins", epoch)
        yield epoch
        logger.info("epoch %d ended", epoch)


@contextlib.contextmanager
def evaluating(*modules):
    modes = [m.training for m in modules]
    for m in modules:
        m.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for m, mode in zip(modules, modes):
            m.train(mode)


class CSVLog:
    def __init__(self, path, fields):
        self.rows = csv.DictWriter(LogFile(path), fields)
        self.rows.writeheader()

    def add(self, **row):
        self.rows.writerow(row)


def main(args, data):
    init(args.out)
    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    encoder = nn.GRU(32, 64, batch_first=True).to(device)
    decoder = nn.Linear(64, args.vocab).to(device)
    params = itertools.chain(encoder.parameters(), decoder.parameters())
    optimizer = torch.optim.Adam(params, lr=args.lr)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=2)
    register(encoder=encoder, decoder=decoder, optimizer=optimizer, plateau=plateau)
    enc, dec = Parallel(encoder, name="enc"), Parallel(decoder, name="dec")
    train = Loader(data["train"], args.batch, shuffle=True, name="train")
    dev = Loader(data["dev"], args.batch, name="dev", even_batches=False)
    v = Variables(best=None)
    sums = Accumulator()
    table = CSVLog(os.path.join(args.out, "log.csv"), ["epoch", "ppl"])

    for epoch in epochs(args.epochs):
        for b in batches(train, device, "train"):
            hidden, _ = enc(b["x"])
            loss = nn.functional.cross_entropy(dec(hidden).flatten(0, 1), b["y"].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with evaluating(enc, dec):
            for b in batches(dev, device, "dev"):
                hidden, _ = enc(b["x"])
                nll = nn.functional.cross_entropy(dec(hidden).flatten(0, 1), b["y"].flatten(), reduction="sum")
                sums["nll"] += nll.item()
                sums["tokens"] += b["y"].numel()
        with sums.synchronized():
            mean = sums["nll"] / max(sums["tokens"], 1)
            sums.clear()
        plateau.step(mean)
        table.add(epoch=epoch, ppl=mean)
        if v.best is None or mean < v.best:
            v.best = mean
