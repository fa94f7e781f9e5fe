"""The two networks that the GPU benchmarks train, and a batch for each."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

# Channels of a stage, its blocks and its stride, as in table 1 of ResNet's paper
# (https://arxiv.org/abs/1512.03385), 50 layers.
STAGES = [(64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)]


class Bottleneck(nn.Module):
    """Three convolutions beside a shortcut."""

    def __init__(self, num_inputs: int, width: int, stride: int) -> None:
        super().__init__()
        num_outputs = 4 * width
        self.layers = nn.Sequential(
            nn.Conv2d(num_inputs, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, num_outputs, 1, bias=False),
            nn.BatchNorm2d(num_outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or num_inputs != num_outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(num_inputs, num_outputs, 1, stride, bias=False),
                nn.BatchNorm2d(num_outputs),
            )

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.relu(self.layers(inputs) + self.shortcut(inputs))


def resnet50() -> nn.Module:
    """Return a network of 25.6 million parameters."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    num_inputs = 64
    for width, num_blocks, stride in STAGES:
        for block in range(num_blocks):
            layers.append(Bottleneck(num_inputs, width, stride if block == 0 else 1))
            num_inputs = 4 * width
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(num_inputs, 1000)
    )


class GPT2(nn.Module):
    """A network of the shape of the smallest GPT-2: 124 million parameters."""

    def __init__(self, width: int, num_layers: int, num_words: int, length: int):
        super().__init__()
        self.words = nn.Embedding(num_words, width)
        self.places = nn.Parameter(torch.zeros(length, width))
        layer = nn.TransformerEncoderLayer(
            width,
            width // 64,
            4 * width,
            0.0,
            "gelu",
            batch_first=True,
            norm_first=True,
        )
        self.layers = nn.TransformerEncoder(
            layer, num_layers, nn.LayerNorm(width), enable_nested_tensor=False
        )
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.layers(
            self.words(words) + self.places, mask=self.mask, is_causal=True
        )
        outputs: Tensor = hidden @ self.words.weight.T
        return outputs


def make(
    name: str, device: torch.device, *, is_small: bool
) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a network on the device, and inputs and targets for a step."""
    torch.manual_seed(0)
    if name == "resnet50":
        shape = (2, 3, 32, 32) if is_small else (128, 3, 224, 224)
        net = resnet50().to(device, memory_format=torch.channels_last)
        inputs = torch.randn(shape, device=device)
        inputs = inputs.contiguous(memory_format=torch.channels_last)
        return net, inputs, torch.randint(1000, shape[:1], device=device)
    size = (64, 2, 512, 32) if is_small else (768, 12, 50304, 1024)
    words = torch.randint(size[2], (2 if is_small else 8, size[3]), device=device)
    return GPT2(*size).to(device), words, words.roll(-1, 1)


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the loss in bfloat16, where the weights and the loss stay in float32."""
    with torch.autocast(inputs.device.type, torch.bfloat16):
        outputs = model(inputs)
    return cross_entropy(outputs.float().flatten(0, -2), targets.flatten())
