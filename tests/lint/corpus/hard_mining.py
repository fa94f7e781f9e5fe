# ---
# jupyter: {jupytext: {formats: "py:percent"}}
# ---
# %% [markdown]
# # Skin lesions: train on what the network still gets wrong
# After a warm-up, each epoch keeps the hardest part of the training set
# (by the last loss of each sample). Run: `elasticrun run notebooks/hard_mining.py`

# %%
from collections import defaultdict

import matplotlib
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import Dataset

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, Variables
from elasticrun import atomic_save, device, rank, register, remaining_epochs_until

matplotlib.use("Agg")
import matplotlib.pyplot as plt

CFG = dict(
    train="data/lesions_train.pt",
    valid="data/lesions_valid.pt",
    classes=7,
    batch_size=64,
    epochs=40,
    warmup=5,
    keep=0.6,
    lr=3e-4,
    seed=2023,
)


# %% Data
class Lesions(Dataset):
    """Returns the sample's own number as well, so that its loss can be noted."""

    def __init__(self, path, augment=False):
        self.images, self.labels = torch.load(path)
        self.active = torch.arange(len(self.labels))
        self.augment = augment

    def keep(self, indices):
        self.active = indices.sort().values

    def __len__(self):
        return len(self.active)

    def __getitem__(self, i):
        index = int(self.active[i])
        x = self.images[index].float() / 255
        if self.augment:
            if torch.rand(()) < 0.5:
                x = x.flip(-1)
            x = torch.rot90(x, int(torch.randint(4, ())), (-2, -1))
        return index, x, self.labels[index]


torch.manual_seed(CFG["seed"])
train_set = Lesions(CFG["train"], augment=True)
valid_set = Lesions(CFG["valid"])
num_samples = len(train_set)
valid = AdaptiveDataLoader(valid_set, batch_size=128, even_batches=False, name="valid")

# %% Model
net = nn.Sequential(
    nn.Conv2d(3, 32, 3, 2, 1), nn.GroupNorm(8, 32), nn.ReLU(),
    nn.Conv2d(32, 64, 3, 2, 1), nn.GroupNorm(8, 64), nn.ReLU(),
    nn.Conv2d(64, 128, 3, 2, 1), nn.GroupNorm(8, 128), nn.ReLU(),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.3), nn.Linear(128, CFG["classes"]),
).to(device())
optimizer = torch.optim.AdamW(net.parameters(), lr=CFG["lr"])
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
model = AdaptiveDataParallel(net, optimizer, scheduler)
averaged = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.999))
register(averaged=averaged)

# %% What a restart must find again
best = Variables(recall=0.0, epoch=-1)
curve = Variables(name="curve", recall=[])
sample_loss = torch.full((num_samples,), 10.0)


# %% One pass of training, one of validation
def train_one(loader):
    model.train()
    for index, x, y in loader:
        x, y = x.to(device()), y.to(device())
        losses = F.cross_entropy(model(x), y, reduction="none", label_smoothing=0.05)
        optimizer.zero_grad()
        losses.mean().backward()
        optimizer.step()
        averaged.update_parameters(net)
        sample_loss[index] = losses.detach().cpu()  # MISTAKE: unreg: a plain tensor that comes back as 10.0 after a restart, and on each replica has only the losses of its own samples: the hardest ones differ by rank (or line with: sample_loss = torch.full((num_samples,), 10.0)) (or line with: hardest = sample_loss.topk(int(CFG["keep"] * num_samples)).indices)


@torch.no_grad()
def balanced_recall():
    averaged.eval()
    hits = Accumulator()
    for _, x, y in valid:
        right = averaged(x.to(device())).argmax(1).cpu() == y
        per_class = defaultdict(int)
        for label, ok in zip(y.tolist(), right.tolist()):
            per_class[f"n{label}"] += 1
            per_class[f"hit{label}"] += ok
        hits.update(per_class)
    with hits.synchronized():
        recalls = [float(hits[f"hit{c}"]) / max(float(hits[f"n{c}"]), 1.0) for c in range(CFG["classes"])]
    return sum(recalls) / len(recalls)


def plot(values):
    plt.figure()
    plt.plot(values)
    plt.xlabel("epoch")
    plt.ylabel("balanced recall")
    plt.savefig("recall.png")  # MISTAKE: everyrank: all replicas write the same picture at the same time (or line with: plot(curve.recall))
    plt.close()


# %% Train
for epoch in remaining_epochs_until(CFG["epochs"]):
    if epoch >= CFG["warmup"]:
        hardest = sample_loss.topk(int(CFG["keep"] * num_samples)).indices
        train_set.keep(hardest)  # MISTAKE: data: the dataset changes between epochs, by values that a restart loses and that differ by rank: sample i is another one after a restart in the epoch (or line with: self.active = indices.sort().values) (or line with: hardest = sample_loss.topk)
    loader = AdaptiveDataLoader(train_set, batch_size=CFG["batch_size"], shuffle=True, num_workers=4)  # MISTAKE: loop: made in the epoch and without a name: loaders are known by the order of making, so after a restart in epoch 6 this is the first one and not the seventh; make it before the epochs, with a sampler (or line with: train_one(loader))
    train_one(loader)
    recall = balanced_recall()
    scheduler.step()
    curve.recall = curve.recall + [recall]
    if recall > best.recall:
        best.recall, best.epoch = recall, epoch
        if rank() == 0:
            atomic_save(averaged.module.state_dict(), "lesions_best.pt")
    plot(curve.recall)
    if rank() == 0:
        print(f"{epoch:3d} recall {recall:.4f} on {len(train_set)} samples, best {best.recall:.4f}")
