# Super resolution with an efficient sub-pixel network (after pytorch/examples).
# Usage: elasticrun run --replicas 2 super_resolution.py --upscale_factor 3
import argparse
import csv
import random
from math import log10
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.nn.init as init
import torch.optim as optim
from torch.utils.data import Dataset

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel
from elasticrun import LogFile, device, rank, remaining_epochs_until

parser = argparse.ArgumentParser(description="PyTorch Super Res Example")
parser.add_argument("--upscale_factor", type=int, default=3)
parser.add_argument("--batchSize", type=int, default=64)
parser.add_argument("--testBatchSize", type=int, default=10)
parser.add_argument("--nEpochs", type=int, default=30)
parser.add_argument("--lr", type=float, default=0.001)
parser.add_argument("--crop", type=int, default=96)
parser.add_argument("--root", default="dataset/BSDS300/images")
parser.add_argument("--seed", type=int, default=123)
opt = parser.parse_args()
if rank() == 0:
    print(opt)

torch.manual_seed(opt.seed)


class Net(nn.Module):
    def __init__(self, upscale_factor):
        super().__init__()
        self.relu = nn.ReLU()
        self.conv1 = nn.Conv2d(1, 64, 5, 1, 2)
        self.conv2 = nn.Conv2d(64, 64, 3, 1, 1)
        self.conv3 = nn.Conv2d(64, 32, 3, 1, 1)
        self.conv4 = nn.Conv2d(32, upscale_factor**2, 3, 1, 1)
        self.pixel_shuffle = nn.PixelShuffle(upscale_factor)
        self._initialize_weights()

    def forward(self, x):
        x = self.relu(self.conv1(x))
        x = self.relu(self.conv2(x))
        x = self.relu(self.conv3(x))
        return self.pixel_shuffle(self.conv4(x))

    def _initialize_weights(self):
        for conv in (self.conv1, self.conv2, self.conv3):
            init.orthogonal_(conv.weight, init.calculate_gain("relu"))
        init.orthogonal_(self.conv4.weight)


class DatasetFromFolder(Dataset):
    """Luma planes as tensors; a random crop in training, the middle in tests."""

    def __init__(self, folder, crop, factor, augment):
        self.image_filenames = sorted(str(p) for p in Path(folder).iterdir() if p.suffix == ".pt")
        self.crop = crop - crop % factor
        self.factor = factor
        self.augment = augment

    def __getitem__(self, index):
        y = torch.load(self.image_filenames[index])
        top, left = (y.shape[-2] - self.crop) // 2, (y.shape[-1] - self.crop) // 2
        if self.augment:
            top = random.randint(0, y.shape[-2] - self.crop)
            left = random.randint(0, y.shape[-1] - self.crop)
        target = y[..., top : top + self.crop, left : left + self.crop]
        small = F.interpolate(target[None], scale_factor=1 / self.factor, mode="area")[0]
        return small, target

    def __len__(self):
        return len(self.image_filenames)


print_every = 20
train_set = DatasetFromFolder(opt.root + "/train", opt.crop, opt.upscale_factor, True)
test_set = DatasetFromFolder(opt.root + "/test", opt.crop, opt.upscale_factor, False)
training_data_loader = AdaptiveDataLoader(train_set, batch_size=opt.batchSize, shuffle=True, num_workers=4, name="train")
testing_data_loader = AdaptiveDataLoader(test_set, batch_size=opt.testBatchSize, num_workers=4, name="test")

net = Net(upscale_factor=opt.upscale_factor).to(device())
optimizer = optim.Adam(net.parameters(), lr=opt.lr)
model = AdaptiveDataParallel(net, optimizer)
criterion = nn.MSELoss()
results = csv.writer(LogFile("results.csv"))
results.writerow(["epoch", "loss", "psnr"])


def train(epoch):
    epoch_loss = 0
    for iteration, batch in training_data_loader.enumerate():
        input, target = batch[0].to(device()), batch[1].to(device())
        optimizer.zero_grad()
        loss = criterion(model(input), target)
        epoch_loss += loss.item()  # MISTAKE: sum: a plain sum of one rank's losses, which a restart in the loop sets back to 0, while it is divided by all batches (or line with: epoch_loss = 0) (or line with: mean = epoch_loss / len(training_data_loader))
        loss.backward()
        optimizer.step()
        if rank() == 0 and iteration % print_every == 0:
            print(f"===> Epoch[{epoch}]({iteration}/{len(training_data_loader)}): Loss: {loss.item():.4f}")

    mean = epoch_loss / len(training_data_loader)
    if rank() == 0:
        print(f"===> Epoch {epoch} Complete: Avg. Loss: {mean:.4f}")
    return mean


def test():
    avg_psnr = Accumulator()
    with torch.no_grad():
        for batch in testing_data_loader:
            input, target = batch[0].to(device()), batch[1].to(device())
            mse = (model(input) - target).square().mean(dim=(1, 2, 3))
            avg_psnr["psnr"] += sum(10 * log10(1 / m) for m in mse.tolist())  # MISTAKE: pad: the loader has even batches, so a replica without a sample in the last one adds the PSNR of a padding sample, which num_samples doesn't count (or line with: testing_data_loader = AdaptiveDataLoader(test_set) (or line with: mse = (model(input) - target).square())
    with avg_psnr.synchronized():
        result = float(avg_psnr["psnr"] / testing_data_loader.num_samples)
    if rank() == 0:
        print(f"===> Avg. PSNR: {result:.4f} dB")
    return result


def checkpoint(epoch):
    model_out_path = f"model_epoch_{epoch}.pth"
    torch.save(net.state_dict(), model_out_path)  # MISTAKE: everyrank: all replicas write the same file at once, and may leave a broken one (or line with: checkpoint(epoch)) (or line with: model_out_path = f"model_epoch_{epoch}.pth")
    if rank() == 0:
        print(f"Checkpoint saved to {model_out_path}")


for epoch in remaining_epochs_until(opt.nEpochs, start=1):
    model.train()
    loss = train(epoch)
    model.eval()
    psnr = test()
    results.writerow([epoch, f"{loss:.5f}", f"{psnr:.3f}"])
    checkpoint(epoch)
