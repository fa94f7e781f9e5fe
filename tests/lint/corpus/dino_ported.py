"""Self-distillation with a registered criterion; ported."""
import copy

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import torchvision
from torchvision import transforms as T

from elasticrun import AdaptiveDataLoader, AdaptiveDataParallel, LogFile, device, rank, register, remaining_epochs_until, world_size

EPOCHS, OUT = 100, 1024


class Criterion(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(1, OUT))

    def forward(self, student, teacher, epoch):
        temperature = 0.04 + 0.03 * min(1.0, epoch / 30)
        wanted = ((teacher - self.center) / temperature).softmax(1).detach()
        return -(wanted * F.log_softmax(student / 0.1, 1)).sum(1).mean()

    @torch.no_grad()
    def update_center(self, teacher):
        total, n = teacher.sum(0, keepdim=True), torch.tensor(float(len(teacher)), device=teacher.device)
        if world_size() > 1:
            dist.all_reduce(total)
            dist.all_reduce(n)
        self.center.mul_(0.9).add_(total / n, alpha=0.1)


class Crops:
    def __init__(self):
        self.t = T.Compose([T.RandomResizedCrop(96, (0.4, 1)), T.RandomHorizontalFlip(), T.ColorJitter(0.4, 0.4, 0.2, 0.1), T.ToTensor()])

    def __call__(self, image):
        return self.t(image), self.t(image)


def main():
    torch.manual_seed(0)
    dev = device()
    data = torchvision.datasets.STL10("data", split="unlabeled", transform=Crops())
    loader = AdaptiveDataLoader(data, batch_size=256, shuffle=True, drop_last=True, num_workers=8, seed_each="sample")
    student = torchvision.models.vit_b_16(image_size=96, num_classes=OUT).to(dev)
    teacher = copy.deepcopy(student).requires_grad_(False)
    optimizer = torch.optim.AdamW(student.parameters(), 5e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(loader))
    model = AdaptiveDataParallel(student, optimizer, scheduler)
    criterion = Criterion().to(dev)
    register(teacher=teacher, criterion=criterion)
    log = LogFile("dino.tsv")
    for epoch in remaining_epochs_until(EPOCHS):
        model.train()
        for step, ((a, b), _) in loader.enumerate():
            a, b = a.to(dev), b.to(dev)
            with torch.no_grad():
                ta, tb = teacher(a), teacher(b)
            loss = (criterion(model(a), tb, epoch) + criterion(model(b), ta, epoch)) / 2
            optimizer.zero_grad()
            loss.backward()
            if epoch == 0:
                for p in student.heads.parameters():
                    p.grad = None
            optimizer.step()
            scheduler.step()
            criterion.update_center(torch.cat([ta, tb]))
            momentum = 0.996 + 0.004 * (epoch * len(loader) + step) / (EPOCHS * len(loader))
            with torch.no_grad():
                for t, s in zip(teacher.parameters(), student.parameters()):
                    t.lerp_(s, 1 - momentum)
            if step % 100 == 0:
                log.write(f"{epoch}\t{step}\t{loss.item():.4f}\n")
        if rank() == 0:
            torch.save(teacher.state_dict(), "dino_teacher.pt")


if __name__ == "__main__":
    main()
