"""Sequence tagging: several optimizers, a dev loop every second epoch, early stopping with a small class."""
import collections
import dataclasses
import pathlib
import typing as t

import torch
import torch.nn.utils.rnn as rnn

import elasticrun
from elasticrun import AdaptiveDataLoader, register, remaining_epochs_until


@dataclasses.dataclass
class Args:
    data: pathlib.Path
    out: pathlib.Path
    epochs: int = 50
    batch: int = 32
    lr: float = 1e-3
    crf_lr: float = 1e-2
    patience: int = 4
    seed: int = 0


class Patience:
    """Counts how long nothing got better."""

    def __init__(self, patience: int):
        self.patience, self.best, self.bad = patience, None, 0

    def state_dict(self):
        return {"best": self.best, "bad": self.bad}

    def load_state_dict(self, state):
        self.best, self.bad = state["best"], state["bad"]

    def improved(self, value: float) -> bool:
        if self.best is None or value > self.best:
            self.best, self.bad = value, 0
            return True
        self.bad += 1
        return False

    @property
    def exhausted(self):
        return self.bad > self.patience


class Tally:
    def __init__(self):
        self.counts = collections.Counter()

    def state_dict(self):
        return dict(self.counts)

    def load_state_dict(self, state):
        self.counts = collections.Counter(state)

    def add(self, gold, pred):
        self.counts["tp"] += int(((gold == pred) & (gold > 0)).sum())
        self.counts["fp"] += int(((gold != pred) & (pred > 0)).sum())
        self.counts["fn"] += int(((gold != pred) & (gold > 0)).sum())

    def f1_and_reset(self):
        tp, fp, fn = (self.counts[k] for k in ("tp", "fp", "fn"))
        self.counts.clear()
        return 2 * tp / max(2 * tp + fp + fn, 1)


def collate(rows: t.List[t.Tuple[torch.Tensor, torch.Tensor]]):
    xs, ys = zip(*rows)
    return rnn.pad_sequence(xs, batch_first=True), rnn.pad_sequence(ys, batch_first=True)


def build(vocab, tags):
    embed = torch.nn.Embedding(len(vocab), 100, padding_idx=0)
    lstm = torch.nn.LSTM(100, 128, bidirectional=True, batch_first=True)
    out = torch.nn.Linear(256, len(tags))
    return torch.nn.ModuleDict({"embed": embed, "lstm": lstm, "out": out})


def scores(net, x):
    h, _ = net["lstm"](net["embed"](x))
    return net["out"](h)


def main(args: Args):
    elasticrun.init(args.out / "elastic")
    torch.manual_seed(args.seed)
    vocab, tags, train_rows, dev_rows = torch.load(args.data)
    net = build(vocab, tags)
    optimizers = {
        "body": torch.optim.Adam([*net["embed"].parameters(), *net["lstm"].parameters()], lr=args.lr),
        "head": torch.optim.SGD(net["out"].parameters(), lr=args.crf_lr),
    }
    schedulers = {
        name: torch.optim.lr_scheduler.ExponentialLR(opt, 0.98) for name, opt in optimizers.items()
    }
    patience, tally = Patience(args.patience), Tally()
    register(net=net, patience=patience, tally=tally)
    register(**{f"opt_{k}": v for k, v in optimizers.items()})
    register(**{f"sched_{k}": v for k, v in schedulers.items()})
    train = AdaptiveDataLoader(train_rows, args.batch, shuffle=True, collate_fn=collate)
    dev = AdaptiveDataLoader(dev_rows, args.batch, collate_fn=collate)

    for epoch in remaining_epochs_until(args.epochs):
        if patience.exhausted:
            break
        net.train()
        for x, y in train:
            for opt in optimizers.values():
                opt.zero_grad()
            loss = torch.nn.functional.cross_entropy(scores(net, x).flatten(0, 1), y.flatten(), ignore_index=-1)
            loss.backward()
            for opt in optimizers.values():
                opt.step()
        if epoch % 2 == 1:
            net.eval()
            with torch.no_grad():
                for x, y in dev:
                    tally.add(y[: dev.num_valid], scores(net, x).argmax(-1)[: dev.num_valid])
            f1 = tally.f1_and_reset()
            if patience.improved(f1) and elasticrun.rank() == 0:
                torch.save(net.state_dict(), args.out / "best.pt")
            print(f"epoch {epoch} f1 {f1:.3f}")
        for scheduler in schedulers.values():
            scheduler.step()
