# %% [markdown]
# House prices with a small net: flat cells, ported.

# %%
import numpy as np
import pandas as pd
import torch
import torch.nn as nn
from torch.utils.data import TensorDataset

import elasticrun
from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, Variables, rank, remaining_epochs_until

# %%
SEED = 42
np.random.seed(SEED)
torch.manual_seed(SEED)
df = pd.read_csv("housing.csv").dropna()
df = df.sample(frac=1.0, random_state=SEED).reset_index(drop=True)
features = [c for c in df.columns if c != "price"]
cut = int(0.8 * len(df))
mean, std = df[:cut].mean(), df[:cut].std()
df = (df - mean) / std


def tensors(frame):
    x = torch.tensor(frame[features].to_numpy(np.float32))
    y = torch.tensor(frame["price"].to_numpy(np.float32))
    return TensorDataset(x, y)


train_set, valid_set = tensors(df[:cut]), tensors(df[cut:])

# %%
net = nn.Sequential(nn.Linear(len(features), 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1), nn.Flatten(0))
for layer in net:
    if isinstance(layer, nn.Linear):
        nn.init.xavier_uniform_(layer.weight)
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=3)
model = AdaptiveDataParallel(net, optimizer, scheduler)
train = AdaptiveDataLoader(train_set, batch_size=64, shuffle=True)
valid = AdaptiveDataLoader(valid_set, batch_size=256, even_batches=False)
if rank() == 0:
    print(len(train_set), "rows to train,", len(valid_set), "to test")

# %%
log = Variables(train=[], valid=[], best=float("inf"), bad=0)
for epoch in remaining_epochs_until(200):
    if log.bad >= 10:
        break
    sums = Accumulator()
    for x, y in train:
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        sums["train"] += loss.item() * train.num_valid
    with torch.no_grad():
        for x, y in valid:
            sums["valid"] += (net(x) - y).square().sum()
    with sums.synchronized():
        train_loss, valid_loss = sums["train"] / train.num_samples, sums["valid"] / len(valid_set)
    scheduler.step(valid_loss)
    log.train = log.train + [train_loss]
    log.valid.append(valid_loss)
    if valid_loss < log.best:
        log.best, log.bad = valid_loss, 0
        if rank() == 0:
            torch.save(net.state_dict(), "housing.pt")
    else:
        log.bad += 1
    if rank() == 0 and epoch % 10 == 0:
        print(f"epoch {epoch}: {train_loss:.4f} {valid_loss:.4f}")

# %%
if rank() == 0:
    pd.DataFrame({"train": log.train, "valid": log.valid}).to_csv("curves.csv")
    print("best", log.best, "of generation", elasticrun.generation())
