import copy

import torch
import torchvision
from torchvision import transforms as T

from elasticrun import AdaptiveDataLoader, device, world_size

REGISTRY = {"model": {}, "data": {}, "optimizer": {}}


def registered(kind, name):
    def wrap(function):
        REGISTRY[kind][name] = function
        return function

    return wrap


def build(kind, node, *args):
    node = copy.deepcopy(node)
    return REGISTRY[kind][node.pop("name")](*args, **node)


@registered("model", "resnet")
def resnet(depth=18, classes=100):
    return getattr(torchvision.models, f"resnet{depth}")(num_classes=classes)


@registered("model", "vit")
def vit(classes=100):
    return torchvision.models.vit_b_16(num_classes=classes)


@registered("data", "cifar100")
def cifar100(root="data", size=32):
    fit = T.Compose([T.RandomCrop(size, 4), T.RandomHorizontalFlip(), T.TrivialAugmentWide(), T.ToTensor()])
    dataset = torchvision.datasets.CIFAR100
    return dataset(root, True, fit), dataset(root, False, T.ToTensor())


@registered("optimizer", "sgd")
def sgd(parameters, lr=0.1, momentum=0.9, weight_decay=5e-4):
    return torch.optim.SGD(parameters, lr, momentum, weight_decay=weight_decay, nesterov=True)


@registered("optimizer", "adamw")
def adamw(parameters, lr=1e-3, weight_decay=0.05):
    return torch.optim.AdamW(parameters, lr, weight_decay=weight_decay)


def build_loaders(cfg):
    fit, held = build("data", cfg["data"])
    local = cfg["loader"]["batch_size"] // world_size()
    options = dict(num_workers=cfg["loader"]["workers"], device=device())
    train = AdaptiveDataLoader(fit, batch_size=local, shuffle=True, drop_last=True, name="train", **options)  # MISTAKE: world: batch_size is the global batch, this one changes with the number of replicas (or line with: local = cfg["loader"]["batch_size"])
    valid = AdaptiveDataLoader(held, batch_size=500, name="valid", **options)
    return train, valid
