"""An auto-encoder for anomalies, with a threshold kept beside it; ported."""
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import Dataset

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, Variables, rank, remaining_epochs_until


class Signals(Dataset):
    """Windows of a signal; spectra are made once and remembered."""

    def __init__(self, path, window=64):
        signal = np.load(path).astype(np.float32)
        self.windows = np.lib.stride_tricks.sliding_window_view(signal, window)[:: window // 2]
        self.cache = {}

    def __len__(self):
        return len(self.windows)

    def __getitem__(self, i):
        if i not in self.cache:
            self.cache[i] = torch.from_numpy(np.log1p(np.abs(np.fft.rfft(self.windows[i]))).astype(np.float32))
        return self.cache[i]


def build():
    return nn.Sequential(nn.Linear(33, 16), nn.ReLU(), nn.Linear(16, 4), nn.ReLU(), nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 33))


@torch.no_grad()
def errors_of(net, loader):
    sums = Accumulator()
    for x in loader:
        e = (net(x) - x).square().mean(1)[: loader.num_valid]
        sums["n"] += len(e)
        sums["e"] += e.sum()
        sums["e2"] += e.square().sum()
    with sums.synchronized():
        mean = sums["e"] / sums["n"]
        variance = sums["e2"] / sums["n"] - mean**2
    return mean, max(variance, 0.0) ** 0.5


def main():
    torch.manual_seed(0)
    train = AdaptiveDataLoader(Signals("normal.npy"), batch_size=64, shuffle=True)
    valid = AdaptiveDataLoader(Signals("normal-valid.npy"), batch_size=256)
    odd = AdaptiveDataLoader(Signals("odd.npy"), batch_size=256)
    net = build()
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    model = AdaptiveDataParallel(net, optimizer)
    kept = Variables(threshold=0.0, history=())
    for epoch in remaining_epochs_until(40):
        noise = 0.1 * (1 - epoch / 40)
        for x in train:
            loss = F.mse_loss(model(x + noise * torch.randn_like(x)), x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        mean, deviation = errors_of(net, valid)
        kept.threshold = mean + 3 * deviation  # ARGUABLE: changed in front of the loop that comes in each fifth epoch; states are given back there, so it is right
        kept.history += (kept.threshold,)  # ARGUABLE: the same; a state is given back where the replay ends
        if epoch % 5 == 4:
            strange, _ = errors_of(net, odd)
            if rank() == 0:
                print(f"epoch {epoch}: normal {mean:.4f}, odd {strange:.4f}, threshold {kept.threshold:.4f}")
    if rank() == 0:
        np.save("thresholds.npy", np.array(kept.history))
        torch.save({"net": net.state_dict(), "threshold": kept.threshold}, "anomaly.pt")


main()
