"""Quantisation-aware training of a ResNet, after torchvision's reference."""
import argparse
import copy
import os

import torch
import torch.nn.functional as F
import torch.utils.data
from torchvision import datasets, models, transforms

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, Variables, device, once, rank, remaining_epochs_until


def get_args_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="PyTorch Quantization Training")
    parser.add_argument("--data-path", default="imagenette")
    parser.add_argument("--backend", default="qnnpack")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--num-calibration-batches", type=int, default=32)
    parser.add_argument("--num-observer-update-epochs", type=int, default=4)
    parser.add_argument("--num-batch-norm-update-epochs", type=int, default=3)
    parser.add_argument("--output-dir", default="qat")
    return parser


def build_datasets(root: str):
    normalize = transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    train = transforms.Compose([transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(), transforms.ToTensor(), normalize])
    val = transforms.Compose([transforms.Resize(256), transforms.CenterCrop(224), transforms.ToTensor(), normalize])
    return datasets.ImageFolder(os.path.join(root, "train"), train), datasets.ImageFolder(os.path.join(root, "val"), val)


@torch.inference_mode()
def evaluate(net, loader, dev) -> float:
    net.eval()
    acc = Accumulator()
    for image, target in loader:
        output = net(image.to(dev)).cpu()
        acc["top1"] += (output.argmax(1) == target).sum()
        acc["n"] += len(target)
    with acc.synchronized():
        return 100 * acc["top1"] / acc["n"]


@torch.inference_mode()
def evaluate_quantized(net, dataset, num_images: int = 500) -> float:
    """On one replica, on the CPU: all samples from a plain loader."""
    converted = torch.ao.quantization.convert(copy.deepcopy(net).cpu().eval(), inplace=False)
    hits = 0
    subset = torch.utils.data.Subset(dataset, range(0, len(dataset), max(1, len(dataset) // num_images)))
    for image, target in torch.utils.data.DataLoader(subset, batch_size=50):
        hits += int((converted(image).argmax(1) == target).sum())
    return 100 * hits / len(subset)


def train_one_epoch(model, optimizer, loader, dev, epoch: int) -> None:
    model.train()
    for image, target in loader:
        loss = F.cross_entropy(model(image.to(dev)), target.to(dev))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loader.batch_index % 50 == 0 and rank() == 0:
            print(f"Epoch: [{epoch}] [{loader.batch_index}/{len(loader)}] loss {loss.item():.4f}")


def main(args: argparse.Namespace) -> None:
    os.makedirs(args.output_dir, exist_ok=True)
    torch.manual_seed(0)
    torch.backends.quantized.engine = args.backend
    dev = device()
    train_set, val_set = build_datasets(args.data_path)
    train = AdaptiveDataLoader(train_set, batch_size=args.batch_size, shuffle=True, num_workers=8, drop_last=True)
    val = AdaptiveDataLoader(val_set, batch_size=256, num_workers=8, even_batches=False)
    net = models.quantization.resnet18(weights="DEFAULT", quantize=False, num_classes=1000)
    net.fuse_model(is_qat=True)
    net.qconfig = torch.ao.quantization.get_default_qat_qconfig(args.backend)
    torch.ao.quantization.prepare_qat(net.train(), inplace=True)
    net.to(dev)
    optimizer = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 8, 0.1)
    model = AdaptiveDataParallel(net, optimizer, scheduler)
    best = Variables(top1=0.0)
    for epoch in remaining_epochs_until(args.epochs):
        if epoch == args.num_observer_update_epochs:
            if rank() == 0:
                print("Disabling observer for subsequent epochs")  # ARGUABLE: a print in front of a loop is repeated
            net.apply(torch.ao.quantization.disable_observer)  # ARGUABLE: what it sets are buffers of the net, which the checkpoint has
        if epoch == args.num_batch_norm_update_epochs:
            if rank() == 0:
                print("Freezing BN for subsequent epochs")  # ARGUABLE: the same
            net.apply(torch.ao.nn.intrinsic.qat.freeze_bn_stats)  # MISTAKE: lost: sets an attribute of modules, so after a restart in a later epoch the statistics are no longer frozen; epoch >= (or line with: if epoch == args.num_batch_norm_update_epochs:)
        train_one_epoch(model, optimizer, train, dev, epoch)
        if rank() == 0 and once("converted"):  # MISTAKE: once: once is collective, but rank 0 alone calls it; once("converted") and rank() == 0
            top1 = evaluate_quantized(net, val_set)
            with open(os.path.join(args.output_dir, "converted.txt"), "a") as f:
                f.write(f"{epoch} {top1:.2f}\n")  # ARGUABLE: appended once, by the guard above
        top1 = evaluate(net, val, dev)
        scheduler.step()
        if rank() == 0:
            print(f"epoch {epoch} top1 {top1:.2f} best {best.top1:.2f}")
            if top1 > best.top1:
                best.top1 = top1  # MISTAKE: vars: set on rank 0 only, so the other replicas' values differ from the saved one
                torch.save(net.state_dict(), os.path.join(args.output_dir, "best.pth"))


if __name__ == "__main__":
    main(get_args_parser().parse_args())
