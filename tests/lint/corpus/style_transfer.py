"""Fast neural style: a net that draws photographs in the style of one picture."""
import argparse
import os
import time
from collections import namedtuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from PIL import Image
from torchvision import datasets, models, transforms

from elasticrun import AdaptiveDataLoader, AdaptiveDataParallel, device, rank, remaining_epochs_until

VggOutputs = namedtuple("VggOutputs", ["relu1_2", "relu2_2", "relu3_3", "relu4_3"])


class Vgg16(nn.Module):
    def __init__(self):
        super().__init__()
        features = models.vgg16(weights=models.VGG16_Weights.DEFAULT).features
        self.slices = nn.ModuleList([features[:4], features[4:9], features[9:16], features[16:23]])
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> VggOutputs:
        outputs = []
        for part in self.slices:
            x = part(x)
            outputs.append(x)
        return VggOutputs(*outputs)


class ConvLayer(nn.Sequential):
    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, upsample: int = 1, last: bool = False):
        layers = [nn.Upsample(scale_factor=upsample)] if upsample > 1 else []
        layers += [nn.ReflectionPad2d(kernel // 2), nn.Conv2d(inputs, outputs, kernel, stride)]
        layers += [] if last else [nn.InstanceNorm2d(outputs, affine=True), nn.ReLU()]
        super().__init__(*layers)


class Residual(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.body = nn.Sequential(ConvLayer(width, width, 3, 1), ConvLayer(width, width, 3, 1, last=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x)


def transformer_net() -> nn.Sequential:
    down = [ConvLayer(3, 32, 9, 1), ConvLayer(32, 64, 3, 2), ConvLayer(64, 128, 3, 2)]
    up = [ConvLayer(128, 64, 3, 1, upsample=2), ConvLayer(64, 32, 3, 1, upsample=2), ConvLayer(32, 3, 9, 1, last=True)]
    return nn.Sequential(*down, *[Residual(128) for _ in range(5)], *up)


def gram_matrix(y: torch.Tensor) -> torch.Tensor:
    b, ch, h, w = y.shape
    features = y.view(b, ch, h * w)
    return features @ features.transpose(1, 2) / (ch * h * w)


def normalize_batch(batch: torch.Tensor) -> torch.Tensor:
    mean = batch.new_tensor([0.485, 0.456, 0.406]).view(-1, 1, 1)
    std = batch.new_tensor([0.229, 0.224, 0.225]).view(-1, 1, 1)
    return (batch / 255.0 - mean) / std


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    dev = device()
    transform = transforms.Compose([transforms.Resize(args.image_size), transforms.CenterCrop(args.image_size), transforms.ToTensor(), transforms.Lambda(lambda x: x.mul(255))])
    train_loader = AdaptiveDataLoader(datasets.ImageFolder(args.dataset, transform), batch_size=args.batch_size, shuffle=True, num_workers=4, pin_memory=True)
    transformer = transformer_net().to(dev)
    optimizer = torch.optim.Adam(transformer.parameters(), args.lr)
    model = AdaptiveDataParallel(transformer, optimizer)
    vgg = Vgg16().to(dev).eval()
    style = transforms.ToTensor()(Image.open(args.style_image).convert("RGB")).mul(255)
    gram_style = [gram_matrix(y) for y in vgg(normalize_batch(style[None].to(dev)))]
    for e in remaining_epochs_until(args.epochs):
        transformer.train()
        agg_content_loss, agg_style_loss, count = 0.0, 0.0, 0
        for batch_id, (x, _) in train_loader.enumerate():
            optimizer.zero_grad()
            x = x.to(dev)
            y = model(x)
            features_y, features_x = vgg(normalize_batch(y)), vgg(normalize_batch(x))
            content_loss = args.content_weight * F.mse_loss(features_y.relu2_2, features_x.relu2_2)
            style_loss = 0.0
            for ft_y, gm_s in zip(features_y, gram_style):
                gm_y = gram_matrix(ft_y)
                style_loss += F.mse_loss(gm_y, gm_s.expand_as(gm_y))
            style_loss *= args.style_weight
            total_loss = content_loss + style_loss
            total_loss.backward()
            optimizer.step()
            agg_content_loss += content_loss.item()  # ARGUABLE: printed only
            agg_style_loss += style_loss.item()  # ARGUABLE: printed only
            count += 1  # ARGUABLE: printed only
            if (batch_id + 1) % args.log_interval == 0 and rank() == 0:
                print(f"{time.ctime()}\tEpoch {e + 1}:\t[{train_loader.index}/{train_loader.num_samples}]\tcontent: {agg_content_loss / count:.6f}\tstyle: {agg_style_loss / count:.6f}")  # ARGUABLE: printed only
            if (batch_id + 1) % args.checkpoint_interval == 0 and rank() == 0:
                path = os.path.join(args.checkpoint_model_dir, f"ckpt_epoch_{e}_batch_id_{batch_id + 1}.pth")
                torch.save(transformer.state_dict(), path)
    if rank() == 0:
        name = f"epoch_{args.epochs}_{args.content_weight:g}_{args.style_weight:g}.model"
        torch.save(transformer.eval().cpu().state_dict(), os.path.join(args.checkpoint_model_dir, name))


def main() -> None:
    parser = argparse.ArgumentParser(description="fast-neural-style")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--style-image", default="images/mosaic.jpg")
    parser.add_argument("--checkpoint-model-dir", default="models")
    parser.add_argument("--image-size", type=int, default=256)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--content-weight", type=float, default=1e5)
    parser.add_argument("--style-weight", type=float, default=1e10)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--log-interval", type=int, default=500)
    parser.add_argument("--checkpoint-interval", type=int, default=2000)
    args = parser.parse_args()
    os.makedirs(args.checkpoint_model_dir, exist_ok=True)
    train(args)


if __name__ == "__main__":
    main()
