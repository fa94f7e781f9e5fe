"""Loaders of an image folder."""
import os

from PIL import Image
from torch.utils.data import Dataset
from torchvision import transforms as T

from elasticrun import AdaptiveDataLoader


class Folder(Dataset):
    def __init__(self, root, transform):
        self.transform = transform
        self.classes = [d for d in os.listdir(root) if os.path.isdir(os.path.join(root, d))]  # MISTAKE: data: the order of listdir is not defined, so labels may differ between starts and replicas; sort it
        self.samples = []
        for label, name in enumerate(self.classes):
            for file in sorted(os.listdir(os.path.join(root, name))):
                self.samples.append((os.path.join(root, name, file), label))

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, i):
        path, label = self.samples[i]
        with open(path, "rb") as f:
            return self.transform(Image.open(f).convert("RGB")), label


def build_loaders(root, batch_size):
    train_t = T.Compose([T.RandomResizedCrop(224), T.RandomHorizontalFlip(), T.ToTensor()])
    eval_t = T.Compose([T.Resize(256), T.CenterCrop(224), T.ToTensor()])
    train_set = Folder(os.path.join(root, "train"), train_t)
    valid_set = Folder(os.path.join(root, "val"), eval_t)
    train = AdaptiveDataLoader(train_set, batch_size=batch_size, shuffle=True, num_workers=8, seed_each="sample", name="train")
    valid = AdaptiveDataLoader(valid_set, batch_size=batch_size, num_workers=8, even_batches=False, name="valid")
    return train, valid, len(train_set.classes)
