"""Gradual magnitude pruning of a trained ResNet, with fine-tuning in between."""
import argparse
import json
from typing import Dict, List, Tuple

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.nn.utils.prune as prune
from torchvision import datasets, models, transforms

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, Variables, device, rank, remaining_epochs_until


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Gradual pruning (Zhu and Gupta)")
    parser.add_argument("--dense", default="resnet18_dense.pt", help="weights of the dense net")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--begin", type=int, default=2)
    parser.add_argument("--end", type=int, default=30)
    parser.add_argument("--every", type=int, default=2)
    parser.add_argument("--final-sparsity", type=float, default=0.9)
    parser.add_argument("--lr", type=float, default=0.01)
    return parser.parse_args()


def target_sparsity(epoch: int, args: argparse.Namespace) -> float:
    progress = min(1.0, max(0.0, (epoch - args.begin) / (args.end - args.begin)))
    return args.final_sparsity * (1 - (1 - progress) ** 3)


def prunable(net: nn.Module) -> List[Tuple[nn.Module, str]]:
    return [(m, "weight") for m in net.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]


def sparsity_of(net: nn.Module) -> float:
    weights = [getattr(module, name) for module, name in prunable(net)]
    return sum(int((w == 0).sum()) for w in weights) / sum(w.numel() for w in weights)


def make_loaders() -> Tuple[AdaptiveDataLoader, AdaptiveDataLoader]:
    normalize = transforms.Normalize((0.491, 0.482, 0.447), (0.247, 0.243, 0.262))
    augment = transforms.Compose([transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip(), transforms.ToTensor(), normalize])
    plain = transforms.Compose([transforms.ToTensor(), normalize])
    train = AdaptiveDataLoader(datasets.CIFAR10("data", transform=augment), batch_size=256, shuffle=True, num_workers=4)
    test = AdaptiveDataLoader(datasets.CIFAR10("data", train=False, transform=plain), batch_size=512)
    return train, test


@torch.no_grad()
def evaluate(net: nn.Module, loader: AdaptiveDataLoader, dev: torch.device) -> Dict[str, float]:
    net.eval()
    total = Accumulator()
    for x, y in loader:
        logits = net(x.to(dev)).cpu()[: loader.num_valid]
        y = y[: loader.num_valid]
        total["loss"] += F.cross_entropy(logits, y, reduction="sum")
        total["hits"] += (logits.argmax(1) == y).sum()
        total["n"] += len(y)
    with total.synchronized():
        return {"loss": total["loss"] / total["n"], "accuracy": total["hits"] / total["n"]}


def main() -> None:
    args = parse_args()
    torch.manual_seed(0)
    dev = device()
    train, test = make_loaders()
    net = models.resnet18(num_classes=10).to(dev)
    optimizer = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    model = AdaptiveDataParallel(net, optimizer, scheduler)
    net.load_state_dict(torch.load(args.dense, map_location=dev))  # MISTAKE: zoneP: each start puts the dense weights over those of the checkpoint; load them before the wrapping (or line with: model = AdaptiveDataParallel(net, optimizer, scheduler))
    best = Variables(accuracy=0.0, epoch=-1)
    history: List[Dict[str, float]] = []
    for epoch in remaining_epochs_until(args.epochs):
        model.train()
        for x, y in train:
            loss = F.cross_entropy(model(x.to(dev)), y.to(dev))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        metrics = evaluate(net, test, dev)
        sparsity = sparsity_of(net)
        history.append({"epoch": epoch, "sparsity": sparsity, **metrics})  # MISTAKE: lost: rows of epochs before the restart are missing in the file at the end (or line with: history: List) (or line with: json.dump(history)
        if epoch >= args.end and metrics["accuracy"] > best.accuracy:
            best.accuracy, best.epoch = metrics["accuracy"], epoch
            if rank() == 0:
                torch.save(net.state_dict(), "pruned_best.pt")
        if args.begin <= epoch <= args.end and epoch % args.every == 0:
            parameters = prunable(net)
            prune.global_unstructured(parameters, prune.L1Unstructured, amount=target_sparsity(epoch, args))  # MISTAKE: lost: makes new names in the net, which a new start does not have, so the saved weights and masks do not fit; prune at the start too if that epoch is finished (or line with: if args.begin <= epoch)
        scheduler.step()
        if rank() == 0:
            print(f"epoch {epoch}: {metrics['accuracy']:.2%} at sparsity {sparsity:.1%}")
    if rank() == 0:
        with open("pruning.json", "w") as f:
            json.dump(history, f, indent=2)


if __name__ == "__main__":
    main()
