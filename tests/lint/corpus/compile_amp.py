"""torch.compile, float16 with a scaler, clipping."""
import argparse
import time

import torch
import torch.nn.functional as F
import torchvision
from torchvision import transforms as T

from elasticrun import AdaptiveDataLoader, AdaptiveDataParallel, device, rank, remaining_epochs_until

p = argparse.ArgumentParser()
p.add_argument("--epochs", type=int, default=90)
p.add_argument("--warmup-steps", type=int, default=1000)
args = p.parse_args()
torch.manual_seed(0)
torch.set_float32_matmul_precision("high")
dev = device()
t = T.Compose([T.RandomResizedCrop(176), T.RandomHorizontalFlip(), T.ToTensor()])
train = AdaptiveDataLoader(torchvision.datasets.ImageFolder("imagenette/train", t), batch_size=256, shuffle=True, num_workers=8)
valid = AdaptiveDataLoader(torchvision.datasets.ImageFolder("imagenette/val", T.Compose([T.Resize(232), T.CenterCrop(224), T.ToTensor()])), batch_size=256, num_workers=8)
net = torchvision.models.resnet50(num_classes=10).to(dev)
optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9, weight_decay=2e-5)
model = AdaptiveDataParallel(net, optimizer)
compiled = torch.compile(model)
scaler = torch.amp.GradScaler(dev.type)  # MISTAKE: unreg: the scale and its growth counter begin anew; register(scaler=scaler) (or line with: scaler.update())
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(train))  # MISTAKE: unreg: made after the wrapping and never registered (or line with: scheduler.step()) (or line with: model = AdaptiveDataParallel)


@torch.no_grad()
def validate():
    compiled.eval()
    correct = torch.zeros((), device=dev)
    count = 0
    for x, y in valid:
        correct += (compiled(x.to(dev)).argmax(1) == y.to(dev)).sum()  # MISTAKE: sum: local sums of a loop that may be continued and that is shared among replicas (or line with: correct = torch.zeros) (or line with: return correct)
        count += len(y)  # ARGUABLE: the other half of the same mean
    return correct.item() / count


for epoch in remaining_epochs_until(args.epochs):
    compiled.train()
    t0 = time.perf_counter()
    for i, (x, y) in train.enumerate():
        with torch.autocast(dev.type, dtype=torch.float16):
            loss = F.cross_entropy(compiled(x.to(dev)), y.to(dev), label_smoothing=0.1)
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 5.0)
        scaler.step(optimizer)
        scaler.update()
        if epoch * len(train) + i >= args.warmup_steps:
            scheduler.step()
    accuracy = validate()
    if rank() == 0:
        print(f"epoch {epoch}: {accuracy:.4f} in {time.perf_counter() - t0:.0f} s")
