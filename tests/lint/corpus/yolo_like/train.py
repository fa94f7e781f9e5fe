"""Trains a small one-stage detector."""
import math

import torch
from dataset import Boxes, collate
from model import Detector, compute_loss
from utils import ModelEMA, fitness, increment_path

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, LogFile, device, rank, register, remaining_epochs_until

EPOCHS, CLOSE_MOSAIC, WARMUP = 100, 10, 3


def main():
    torch.manual_seed(0)
    dev = device()
    save_dir = increment_path("runs/exp")
    train_set, val_set = Boxes("train.txt", mosaic=True), Boxes("val.txt", mosaic=False)
    train = AdaptiveDataLoader(train_set, batch_size=16, shuffle=True, collate_fn=collate, num_workers=4)
    val = AdaptiveDataLoader(val_set, batch_size=32, collate_fn=collate, even_batches=False)
    net = Detector().to(dev)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.937, nesterov=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda e: (1 + math.cos(e * math.pi / EPOCHS)) / 2 * 0.99 + 0.01)
    ema = ModelEMA(net)
    model = AdaptiveDataParallel(net, optimizer, scheduler)
    register(ema=ema)
    log = LogFile(str(save_dir / "results.csv"))
    best_fitness = 0.0
    nb = len(train)
    for epoch in remaining_epochs_until(EPOCHS):
        if epoch == EPOCHS - CLOSE_MOSAIC:
            train_set.mosaic = False  # MISTAKE: lost: a restart in one of the last epochs has the mosaic again; use >= (or line with: if epoch == EPOCHS - CLOSE_MOSAIC)
        model.train()
        for i, (images, targets) in train.enumerate():
            ni = i + nb * epoch
            if ni < WARMUP * nb:
                for g in optimizer.param_groups:
                    g["momentum"] = 0.8 + 0.137 * ni / (WARMUP * nb)
            loss = compute_loss(model(images.to(dev)), targets.to(dev))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ema.update(net)
        scheduler.step()
        total = Accumulator()
        with torch.no_grad():
            for images, targets in val:
                found = ema.ema(images.to(dev)).sigmoid() > 0.5
                total["tp"] += (found & targets.to(dev).bool()).sum()
                total["fp"] += (found & ~targets.to(dev).bool()).sum()
                total["p"] += targets.sum()
        with total.synchronized():
            fi = fitness(total["tp"], total["fp"], total["p"])
        best_fitness = max(best_fitness, fi)  # MISTAKE: lost: 0 after a restart, so the next model counts as best (or line with: best_fitness = 0.0) (or line with: if fi == best_fitness)
        log.write(f"{epoch},{fi:.5f}\n")
        if rank() == 0:
            torch.save({"epoch": epoch, "ema": ema.ema.state_dict()}, save_dir / "last.pt")
            if fi == best_fitness:
                torch.save({"epoch": epoch, "ema": ema.ema.state_dict()}, save_dir / "best.pt")


if __name__ == "__main__":
    main()
