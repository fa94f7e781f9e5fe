"""The trainer: run it with `python trainer.py`."""
import json
import os
import time
from typing import Dict, Tuple

import torch
from networks import DepthNet, StereoPairs, smoothness, warp
from options import MonodepthOptions
from torch.utils.tensorboard import SummaryWriter

from elasticrun import AdaptiveDataLoader, AdaptiveDataParallel, device, rank, remaining_epochs_until


class Trainer:
    def __init__(self, options):
        self.opt = options
        self.log_path = os.path.join(self.opt.log_dir, self.opt.model_name)
        self.device = device()
        self.net = DepthNet().to(self.device)
        self.model_optimizer = torch.optim.Adam(self.net.parameters(), self.opt.learning_rate)
        self.model_lr_scheduler = torch.optim.lr_scheduler.StepLR(self.model_optimizer, self.opt.scheduler_step_size, 0.1)
        self.model = AdaptiveDataParallel(self.net, self.model_optimizer, self.model_lr_scheduler)
        train_set, val_set = (StereoPairs(self.opt.data_path, split, self.opt.height, self.opt.width) for split in ("train", "val"))
        self.train_loader = AdaptiveDataLoader(train_set, self.opt.batch_size, True, num_workers=self.opt.num_workers, pin_memory=True, drop_last=True)
        self.val_loader = AdaptiveDataLoader(val_set, self.opt.batch_size, True, num_workers=self.opt.num_workers, pin_memory=True, drop_last=True)
        self.val_iter = iter(self.val_loader)  # MISTAKE: loop: an iterator kept over batches and epochs, a loop that overlaps with the training; LoopOrderError (or line with: left, right = next(self.val_iter)) (or line with: self.val_iter = iter(self.val_loader))
        self.writers: Dict[str, SummaryWriter] = {}
        for mode in ["train", "val"]:
            self.writers[mode] = SummaryWriter(os.path.join(self.log_path, mode))  # MISTAKE: everyrank: each replica writes events into the same folder; on rank 0 only
        if rank() == 0:
            self.save_opts()

    def set_train(self) -> None:
        self.net.train()

    def set_eval(self) -> None:
        self.net.eval()

    def train(self) -> None:
        """Run the entire training pipeline."""
        self.step = 0
        self.start_time = time.time()
        for self.epoch in remaining_epochs_until(self.opt.num_epochs):
            self.run_epoch()
            if rank() == 0:
                self.save_model()

    def run_epoch(self) -> None:
        if rank() == 0:
            print("Training")  # ARGUABLE: a print in front of the loop is repeated
        self.set_train()
        for left, right in self.train_loader:
            outputs, losses = self.process_batch(self.model, left, right)
            self.model_optimizer.zero_grad()
            losses["loss"].backward()
            self.model_optimizer.step()
            early_phase = self.step % self.opt.log_frequency == 0 and self.step < 2000
            late_phase = self.step % 2000 == 0
            if early_phase or late_phase:
                self.log_time(losses["loss"].item())
                self.log("train", outputs, losses)
                self.val()
            self.step += 1  # MISTAKE: lost: 0 again after a restart, so curves begin at 0 again and are logged as in the early phase (or line with: self.step = 0)
        self.model_lr_scheduler.step()

    def process_batch(self, net, left: torch.Tensor, right: torch.Tensor) -> Tuple[dict, Dict[str, torch.Tensor]]:
        left, right = left.to(self.device), right.to(self.device)
        disparity = net(left)
        predicted = warp(right, disparity)
        photometric = (predicted - left).abs().mean()
        smooth = smoothness(disparity, left)
        return {"disparity": disparity, "left": left}, {"loss": photometric + self.opt.disparity_smoothness * smooth, "photometric": photometric}

    def val(self) -> None:
        """Validate the model on a single minibatch."""
        self.set_eval()
        try:
            left, right = next(self.val_iter)
        except StopIteration:
            self.val_iter = iter(self.val_loader)  # ARGUABLE: the same iterator, marked where it is made
            left, right = next(self.val_iter)  # ARGUABLE: the same
        with torch.no_grad():
            outputs, losses = self.process_batch(self.net, left, right)
            self.log("val", outputs, losses)
        self.set_train()

    def log_time(self, loss: float) -> None:
        if rank() == 0:
            print(f"epoch {self.epoch:>3} | batch {self.train_loader.batch_index:>6} | loss: {loss:.5f} | {time.time() - self.start_time:.0f} s")  # ARGUABLE: seconds of this start, but printed only

    def log(self, mode: str, outputs: dict, losses: Dict[str, torch.Tensor]) -> None:
        writer = self.writers[mode]
        for name, value in losses.items():
            writer.add_scalar(name, value, self.step)  # ARGUABLE: by all replicas, marked where the writers are made
        writer.add_image("disparity", outputs["disparity"][0] / 0.3, self.step)  # ARGUABLE: the same
        writer.add_image("left", outputs["left"][0], self.step)  # ARGUABLE: the same

    def save_opts(self) -> None:
        os.makedirs(self.log_path, exist_ok=True)
        with open(os.path.join(self.log_path, "opt.json"), "w") as f:
            json.dump(vars(self.opt), f, indent=2)

    def save_model(self) -> None:
        folder = os.path.join(self.log_path, "models", f"weights_{self.epoch}")
        os.makedirs(folder, exist_ok=True)
        torch.save(self.net.state_dict(), os.path.join(folder, "depth.pth"))


if __name__ == "__main__":
    torch.manual_seed(0)
    Trainer(MonodepthOptions().parse()).train()
