"""Neural collaborative filtering."""
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from data import Negatives, load_ratings
from torch.utils.data import TensorDataset

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, device, rank, remaining_epochs_until


class NCF(nn.Module):
    def __init__(self, users, items, dim=32):
        super().__init__()
        self.user, self.item = nn.Embedding(users, dim), nn.Embedding(items, dim)
        self.mlp = nn.Sequential(nn.Linear(2 * dim, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, x):
        return self.mlp(torch.cat([self.user(x[:, 0]), self.item(x[:, 1])], 1)).squeeze(1)


def main():
    torch.manual_seed(0)
    dev = device()
    pairs, users, items = load_ratings("ml-100k/u.data")
    cut = int(0.95 * len(pairs))
    train_set = Negatives(pairs[:cut], items)
    train = AdaptiveDataLoader(train_set, batch_size=256, shuffle=True)
    test = AdaptiveDataLoader(TensorDataset(torch.from_numpy(pairs[cut:])), batch_size=512)
    net = NCF(users, items).to(dev)
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    model = AdaptiveDataParallel(net, optimizer)
    best_hr, best_epoch = 0.0, -1
    for epoch in remaining_epochs_until(20):
        model.train()
        start = time.time()
        train_set.ng_sample()
        for x, label in train:
            loss = F.binary_cross_entropy_with_logits(model(x.to(dev)), label.to(dev))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        total = Accumulator()
        with torch.no_grad():
            for (x,) in test:
                total["hits"] += (model(x.to(dev)) > 0)[: test.num_valid].sum()
        with total.synchronized():
            hr = total["hits"] / test.num_samples
        if rank() == 0:
            print(f"epoch {epoch}: HR {hr:.3f}, {time.strftime('%H:%M:%S', time.gmtime(time.time() - start))}")
        if hr > best_hr:
            best_hr = hr  # MISTAKE: lost: 0 after a restart (or line with: best_hr, best_epoch = 0.0, -1) (or line with: if hr > best_hr)
            best_epoch = epoch  # MISTAKE: lost: -1 after a restart, as the last line then says (or line with: best_hr, best_epoch = 0.0, -1) (or line with: print(f"best epoch)
            if rank() == 0:
                torch.save(net.state_dict(), "ncf.pt")
    if rank() == 0:
        print(f"best epoch {best_epoch}: HR {best_hr:.3f}", np.round(best_hr, 3))


if __name__ == "__main__":
    main()
