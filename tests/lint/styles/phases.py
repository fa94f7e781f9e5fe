"""Transfer learning with a loop over phases."""

import torch
from torch import nn, optim
from torch.optim import lr_scheduler
from torchvision import datasets, models, transforms

from elasticrun import (
    Accumulator,
    AdaptiveDataLoader,
    AdaptiveDataParallel,
    Variables,
    remaining_epochs_until,
)

image_datasets = {
    x: datasets.ImageFolder(f"data/{x}", transforms.ToTensor())
    for x in ["train", "val"]
}
dataloaders = {
    x: AdaptiveDataLoader(image_datasets[x], batch_size=4, shuffle=x == "train", name=x)
    for x in ["train", "val"]
}


def train_model(model, criterion, optimizer, scheduler, num_epochs=25):
    running, kept = Accumulator(), Variables(best_acc=0.0)
    for epoch in remaining_epochs_until(num_epochs):
        print(f"Epoch {epoch}/{num_epochs - 1}")
        for phase in ["train", "val"]:
            if phase == "train":
                model.train()
            else:
                model.eval()
            for inputs, labels in dataloaders[phase]:
                optimizer.zero_grad()
                with torch.set_grad_enabled(phase == "train"):
                    outputs = model(inputs)
                    loss = criterion(outputs, labels)
                    if phase == "train":
                        loss.backward()
                        optimizer.step()
                if phase == "val":
                    n = dataloaders[phase].num_valid
                    running["loss"] += loss.item() * n
                    running["right"] += (outputs.argmax(1) == labels)[:n].sum()
            if phase == "val":
                with running.synchronized():
                    epoch_acc = running["right"] / dataloaders[phase].num_samples
                    print(f"loss {running['loss']:.4f} accuracy {epoch_acc:.4f}")
                    running.clear()
                if epoch_acc > kept.best_acc:
                    kept.best_acc = epoch_acc
        scheduler.step()
    return model


if __name__ == "__main__":
    torch.manual_seed(3)
    backbone = models.resnet18(weights="IMAGENET1K_V1")
    backbone.fc = nn.Linear(backbone.fc.in_features, 2)
    sgd = optim.SGD(backbone.parameters(), lr=0.001, momentum=0.9)
    steps = lr_scheduler.StepLR(sgd, step_size=7, gamma=0.1)
    parallel = AdaptiveDataParallel(backbone, sgd, steps)
    train_model(parallel, nn.CrossEntropyLoss(), sgd, steps)
