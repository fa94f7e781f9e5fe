"""Raw audio from a tree of .npy files, cropped and masked for pretraining."""
import os

import numpy as np
import torch
from torch.utils.data import Dataset


def find_audio(root):
    paths = []
    for folder, _, files in os.walk(root):
        paths += [os.path.join(folder, f) for f in files if f.endswith(".npy")]  # MISTAKE: order: os.walk lists folders in the file system's order, which may be another one on another machine or after a copy: index i is then another file, on each rank or after a restart (or line with: for folder, _, files in os.walk(root):) (or line with: return paths)
    return paths


class MaskedAudio(Dataset):
    def __init__(self, root, max_sample_size, downsample, mask_prob, mask_length, train=True):
        self.paths = find_audio(root)
        self.size = max_sample_size
        self.frames = max_sample_size // downsample
        self.mask_prob, self.mask_length = mask_prob, mask_length
        self.train = train

    def __len__(self):
        return len(self.paths)

    def crop(self, wav):
        if len(wav) < self.size:
            wav = np.pad(wav, (0, self.size - len(wav)))
        diff = len(wav) - self.size
        start = np.random.randint(diff + 1) if self.train else diff // 2
        return wav[start : start + self.size]

    def mask(self, index):
        draw = np.random if self.train else np.random.RandomState(index)
        mask = np.zeros(self.frames, dtype=bool)
        spans = max(1, int(self.mask_prob * self.frames / self.mask_length + draw.rand()))
        for start in draw.randint(0, self.frames - self.mask_length, spans):
            mask[start : start + self.mask_length] = True
        return mask

    def __getitem__(self, index):
        wav = self.crop(np.load(self.paths[index]).astype(np.float32))
        wav = (wav - wav.mean()) / (wav.std() + 1e-5)
        return torch.from_numpy(wav), torch.from_numpy(self.mask(int(index)))
