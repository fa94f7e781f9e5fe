import logging
import os
import random
import shutil
from glob import glob

import h5py
import numpy as np
import torch
import torch.nn.functional as F
from config import Config
from metrics import Dice, mean, soft_dice_loss
from monai.networks.nets import UNet
from torch.utils.data import Dataset
from torch.utils.tensorboard import SummaryWriter

from elasticrun import AdaptiveDataLoader, AdaptiveDataParallel, Variables, device, rank, register, remaining_epochs_until


class Slices(Dataset):
    def __init__(self, cfg, split):
        self.files = sorted(glob(os.path.join(cfg.data, split, "*.h5")))
        self.patch, self.augment = cfg.patch, split == "train"

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        with h5py.File(self.files[i]) as f:
            image, label = f["image"][:], f["label"][:]
        if self.augment:
            turns = random.randrange(4)
            image, label = np.rot90(image, turns), np.rot90(label, turns)
            if np.random.rand() < 0.5:
                image, label = image[:, ::-1], label[:, ::-1]
        image = torch.from_numpy(image.astype(np.float32))[None, None]
        label = torch.from_numpy(label.astype(np.float32))[None, None]
        image = F.interpolate(image, (self.patch, self.patch), mode="bilinear")
        label = F.interpolate(label, (self.patch, self.patch), mode="nearest")
        return image[0], label[0, 0].long()


def setup(cfg):
    if os.path.exists(cfg.snapshot):
        shutil.rmtree(cfg.snapshot)  # MISTAKE: zoneP: each restart deletes the best weights and logs so far (or line with: if os.path.exists(cfg.snapshot))
    os.makedirs(cfg.snapshot, exist_ok=True)
    logging.basicConfig(
        filename=os.path.join(cfg.snapshot, "log.txt"),  # MISTAKE: everyrank: all replicas write the same log file (or line with: logging.basicConfig) (or line with: logging.info)
        level=logging.INFO,
        format="%(asctime)s %(message)s",
    )
    random.seed(cfg.seed)
    np.random.seed(cfg.seed)
    torch.manual_seed(cfg.seed)


def validate(model, loader, cfg):
    model.eval()
    dice = Dice(cfg.classes)
    with torch.no_grad():
        for image, label in loader:
            n = loader.num_valid
            dice.update(model(image).argmax(1)[:n], label[:n])
    return dice.compute()


def main():
    cfg = Config.from_argv()
    setup(cfg)
    writer = SummaryWriter(os.path.join(cfg.snapshot, "tb")) if rank() == 0 else None
    train = AdaptiveDataLoader(
        Slices(cfg, "train"), batch_size=cfg.batch_size, shuffle=True, drop_last=True, num_workers=cfg.workers, device=device()
    )
    valid = AdaptiveDataLoader(Slices(cfg, "val"), batch_size=cfg.batch_size, num_workers=cfg.workers, device=device())
    net = UNet(2, 1, cfg.classes, channels=(32, 64, 128, 256, 512), strides=(2, 2, 2, 2), num_res_units=2, norm="instance")
    net = net.to(device())
    optimizer = torch.optim.SGD(net.parameters(), lr=cfg.base_lr, momentum=0.9, weight_decay=1e-4)
    scaler = torch.amp.GradScaler("cuda", enabled=cfg.amp)
    model = AdaptiveDataParallel(net, optimizer)
    register(scaler=scaler)
    best = Variables(dice=0.0)

    iter_num = 0
    max_iterations = cfg.max_epochs * len(train)
    for epoch in remaining_epochs_until(cfg.max_epochs):
        model.train()
        for image, label in train:
            with torch.autocast("cuda", enabled=cfg.amp):
                logits = model(image)
                ce = F.cross_entropy(logits, label)
                dice = soft_dice_loss(logits.float(), label, cfg.classes)  # MISTAKE: weigh: a ratio over all samples of this replica's share, no mean over samples (or line with: loss = 0.5 * (ce + dice)) (or line with: scaler.scale(loss).backward())
                loss = 0.5 * (ce + dice)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            lr = cfg.base_lr * (1.0 - iter_num / max_iterations) ** 0.9
            for group in optimizer.param_groups:
                group["lr"] = lr
            iter_num += 1  # MISTAKE: lost: is 0 again after a restart, and so the learning rate (or line with: iter_num = 0) (or line with: lr = cfg.base_lr)
            if writer is not None and iter_num % 20 == 0:
                writer.add_scalar("info/lr", lr, iter_num)  # ARGUABLE: points after the checkpoint come twice, at the same step
                writer.add_scalar("info/loss", loss.item(), iter_num)  # ARGUABLE: rank 0's share, for a curve; points after the checkpoint come twice
        if (epoch + 1) % cfg.val_every:
            continue
        scores = validate(model, valid, cfg)
        score = mean(scores)
        if score > best.dice:
            best.dice = score
            if rank() == 0:
                torch.save(net.state_dict(), os.path.join(cfg.snapshot, "best.pth"))
        logging.info("epoch %d dice %.4f best %.4f", epoch, score, best.dice)
        if writer is not None:
            writer.add_scalar("info/dice", score, epoch)


if __name__ == "__main__":
    main()
