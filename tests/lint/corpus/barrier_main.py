"""Speech commands, with barriers and a main process, from a torchrun script."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import torchaudio

from elasticrun import (
    Accumulator,
    AdaptiveDataLoader,
    AdaptiveDataParallel,
    Variables,
    device,
    init,
    rank,
    remaining_epochs_until,
    save_all_states,
    world_size,
)


def is_main():
    return rank() == 0


def prepare():
    if is_main():
        torchaudio.datasets.SPEECHCOMMANDS("data", download=True)
        dist.barrier()  # MISTAKE: collective: only rank 0 comes to this barrier, so it waits for ever


class Commands(torch.utils.data.Dataset):
    def __init__(self, subset):
        self.data = torchaudio.datasets.SPEECHCOMMANDS("data", subset=subset)
        self.labels = sorted(d for d in os.listdir("data/SpeechCommands/speech_commands_v0.02") if not d.startswith("_"))

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        wave, _, label, *_ = self.data[i]
        return F.pad(wave, (0, 16000 - wave.shape[1])), self.labels.index(label)


class M5(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(1, 32, 80, 16), nn.ReLU(), nn.MaxPool1d(4), nn.Conv1d(32, 64, 3), nn.ReLU(), nn.MaxPool1d(4))
        self.out = nn.Linear(64, classes)

    def forward(self, x):
        return self.out(self.body(x).mean(-1))


def main():
    init()
    torch.manual_seed(0)
    prepare()
    dev = device()
    train_set, valid_set = Commands("training"), Commands("validation")
    train = AdaptiveDataLoader(train_set, batch_size=256, shuffle=True, num_workers=4)
    valid = AdaptiveDataLoader(valid_set, batch_size=256, num_workers=4)
    net = M5(len(train_set.labels)).to(dev)
    optimizer = torch.optim.Adam(net.parameters(), 0.01, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20, 0.1)
    model = AdaptiveDataParallel(net, optimizer, scheduler)
    best = Variables(accuracy=0.0)
    for epoch in remaining_epochs_until(50):
        model.train()
        for x, y in train:
            loss = F.cross_entropy(model(x.to(dev)), y.to(dev))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if loss.item() < 0.01:
                break  # MISTAKE: collective: decided by the loss of one replica, so replicas leave at different batches (or line with: if loss.item() < 0.01)
        model.eval()
        total = Accumulator()
        hits = torch.zeros((), device=dev)
        with torch.no_grad():
            for x, y in valid:
                good = (model(x.to(dev)).argmax(1) == y.to(dev))[: valid.num_valid]
                hits += good.sum()  # MISTAKE: sum: all_reduce adds the replicas up, but what was counted before the restart is lost (or line with: hits = torch.zeros) (or line with: dist.all_reduce(hits)) (or line with: accuracy = hits.item())
                total["n"] += len(good)
        if world_size() > 1:
            dist.all_reduce(hits)
        with total.synchronized():
            accuracy = hits.item() / total["n"]
        scheduler.step()
        best.accuracy = max(best.accuracy, accuracy)
        if is_main():
            print(f"epoch {epoch}: {accuracy:.4f} best {best.accuracy:.4f}")
            save_all_states()  # MISTAKE: collective: must be called on every replica, here rank 0 waits for the others


if __name__ == "__main__":
    main()
