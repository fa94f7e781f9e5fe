"""The style of AdaptDL's examples."""

import os

import adaptdl
import adaptdl.torch as adl
import torch
from torch import nn, optim
from torch.utils.tensorboard import SummaryWriter
from torchvision import datasets, models, transforms

adl.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
device = "cuda" if torch.cuda.is_available() else "cpu"
data = datasets.CIFAR10(adaptdl.env.share_path(), transform=transforms.ToTensor())
trainloader = adl.AdaptiveDataLoader(data, batch_size=128, shuffle=True, drop_last=True)
validloader = adl.AdaptiveDataLoader(data, batch_size=100, shuffle=False)
net = models.resnet18().to(device)
criterion = nn.CrossEntropyLoss()
optimizer = optim.SGD([{"params": [p]} for p in net.parameters()], lr=0.1)
lr_scheduler = optim.lr_scheduler.MultiStepLR(optimizer, [30, 45], 0.1)
net = adl.AdaptiveDataParallel(net, optimizer, lr_scheduler)


def train(epoch):
    net.train()
    stats = adl.Accumulator()
    for inputs, targets in trainloader:
        inputs, targets = inputs.to(device), targets.to(device)
        optimizer.zero_grad()
        loss = criterion(net(inputs), targets)
        loss.backward()
        optimizer.step()
        stats["loss_sum"] += loss.item() * targets.size(0)
        stats["total"] += targets.size(0)
    with stats.synchronized():
        stats["loss_avg"] = stats["loss_sum"] / stats["total"]
        print("Train:", stats)


def valid(epoch):
    net.eval()
    stats = adl.Accumulator()
    with torch.no_grad():
        for inputs, targets in validloader:
            outputs = net(inputs.to(device))
            stats["correct"] += outputs.max(1)[1].cpu().eq(targets).sum().item()
            stats["total"] += targets.size(0)
    with stats.synchronized():
        stats["accuracy"] = stats["correct"] / stats["total"]
        writer.add_scalar("Accuracy/Valid", stats["accuracy"], epoch)
        print("Valid:", stats)


with SummaryWriter(os.getenv("ADAPTDL_TENSORBOARD_LOGDIR", "/tmp")) as writer:
    for epoch in adl.remaining_epochs_until(60):
        train(epoch)
        valid(epoch)
        lr_scheduler.step()
