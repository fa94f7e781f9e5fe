"""Transfer learning with TensorBoard."""
import torch
import torch.nn as nn
import torch.nn.functional as F
import torchvision
from torch.utils.tensorboard import SummaryWriter
from torchvision import transforms as T

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, Variables, device, rank, remaining_epochs_until

writer = SummaryWriter("runs/flowers")  # MISTAKE: everyrank: each replica writes events into the same folder; on rank 0 only (or line with: writer.add_scalar("train/loss") (or line with: writer.add_scalar("valid/acc")
tf = T.Compose([T.Resize((224, 224)), T.RandomHorizontalFlip(), T.ToTensor()])
train_set = torchvision.datasets.Flowers102("data", split="train", transform=tf)
valid_set = torchvision.datasets.Flowers102("data", split="val", transform=tf)
train = AdaptiveDataLoader(train_set, batch_size=64, shuffle=True, num_workers=4)
valid = AdaptiveDataLoader(valid_set, batch_size=64, num_workers=4)
net = torchvision.models.mobilenet_v3_small(weights="DEFAULT")
net.classifier[-1] = nn.Linear(net.classifier[-1].in_features, 102)
net.to(device())
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.1)
model = AdaptiveDataParallel(net, optimizer, scheduler)
best = Variables(acc=0.0)
step = 0


def log_images(batch, epoch):
    if rank() == 0:
        writer.add_images("batch", batch[:8], epoch)


for epoch in remaining_epochs_until(25):
    model.train()
    first = None
    for x, y in train:
        if first is None:
            first = x
        loss = F.cross_entropy(model(x.to(device())), y.to(device()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        writer.add_scalar("train/loss", loss.item(), step)
        step += 1  # MISTAKE: lost: the x axis begins at 0 again after a restart (or line with: step = 0)
    model.eval()
    total = Accumulator()
    with torch.no_grad():
        for x, y in valid:
            total["hits"] += (model(x.to(device())).argmax(1).cpu() == y)[: valid.num_valid].sum()
    with total.synchronized():
        acc = total["hits"] / valid.num_samples
    log_images(first, epoch)  # MISTAKE: leftover: first is None when the restart came in the second loop: None[:8] fails (or line with: first = None) (or line with: first = x) (or line with: writer.add_images)
    writer.add_scalar("valid/acc", acc, epoch)
    best.acc = max(best.acc, acc)
    scheduler.step()
writer.close()
