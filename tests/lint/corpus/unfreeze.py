"""Fine-tuning by stages: the head first, then the last block, then all."""
import torch
import torch.nn as nn
import torch.nn.functional as F
import torchvision
from torchvision import transforms as T

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, Variables, device, rank, remaining_epochs_until

torch.manual_seed(0)
dev = device()
train_t = T.Compose([T.RandomResizedCrop(224), T.RandomHorizontalFlip(), T.ToTensor()])
strong_t = T.Compose([T.RandomResizedCrop(224), T.RandAugment(), T.RandomHorizontalFlip(), T.ToTensor()])
valid_t = T.Compose([T.Resize(256), T.CenterCrop(224), T.ToTensor()])
train_set = torchvision.datasets.ImageFolder("birds/train", train_t)
valid_set = torchvision.datasets.ImageFolder("birds/valid", valid_t)
train = AdaptiveDataLoader(train_set, batch_size=64, shuffle=True, num_workers=4)
valid = AdaptiveDataLoader(valid_set, batch_size=64, num_workers=4)
net = torchvision.models.efficientnet_b0(weights="DEFAULT")
net.classifier[1] = nn.Linear(1280, len(train_set.classes))
net.features.requires_grad_(False)
net.to(dev)
optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
model = AdaptiveDataParallel(net, optimizer, scheduler, find_unused_parameters=True)
best = Variables(accuracy=0.0, epoch=0)
smoothing = 0.2


def validate():
    model.eval()
    total = Accumulator()
    with torch.no_grad():
        for x, y in valid:
            total["hits"] += (model(x.to(dev)).argmax(1) == y.to(dev))[: valid.num_valid].sum()
    with total.synchronized():
        return total["hits"] / valid.num_samples


for epoch in remaining_epochs_until(20):
    if epoch == 3:
        net.features[-1].requires_grad_(True)  # MISTAKE: lost: in a restart after epoch 3 the block is frozen again; epoch >= 3 (or line with: if epoch == 3)
    if epoch == 6:
        net.features.requires_grad_(True)  # MISTAKE: lost: in a restart after epoch 6 the features are frozen again; epoch >= 6 (or line with: if epoch == 6)
    if epoch >= 10:
        train_set.transform = strong_t
    if epoch == 12:
        net.classifier[0].p = 0.5  # MISTAKE: lost: dropout's rate is no part of the state, a restart after epoch 12 has the old one (or line with: if epoch == 12)
    model.train()
    for x, y in train:
        loss = F.cross_entropy(model(x.to(dev)), y.to(dev), label_smoothing=smoothing)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    accuracy = validate()
    scheduler.step()
    smoothing = max(0.0, smoothing - 0.02)  # MISTAKE: lost: begins at 0.2 again after a restart (or line with: smoothing = 0.2) (or line with: label_smoothing=smoothing)
    if accuracy > best.accuracy:
        best.accuracy, best.epoch = accuracy, epoch
    if rank() == 0:
        print(f"epoch {epoch}: {accuracy:.4f}, best {best.accuracy:.4f} of epoch {best.epoch}")
