"""Hooks for logging, evaluation and saving."""
import json
import os
import time

import torch
from engine import HookBase

from elasticrun import Accumulator, LogFile, device, rank


class IterationTimer(HookBase):
    """Prints the speed; a new process begins anew, which is what is wanted."""

    def before_train(self):
        self.start, self.steps = time.perf_counter(), 0

    def after_step(self):
        self.steps += 1
        if rank() == 0 and self.steps % 100 == 0:
            print(f"{self.steps / (time.perf_counter() - self.start):.2f} it/s")


class JSONWriter(HookBase):
    """Mean losses of each epoch, one line of JSON."""

    def __init__(self, path):
        self.file = LogFile(path)  # ARGUABLE: the name of the folder is made in main.py

    def before_epoch(self):
        self.sums = Accumulator()

    def after_step(self):
        n = self.trainer.data_loader.num_valid
        for name, loss in self.trainer.loss_dict.items():
            self.sums[name] += loss.item() * n
        self.sums["n"] += n

    def after_epoch(self):
        with self.sums.synchronized():
            n = float(self.sums["n"])
            row = {name: float(self.sums[name]) / n for name in ("loss_obj", "loss_cls", "loss_box")}
        self.file.write(json.dumps({"epoch": self.trainer.epoch, **row}) + "\n")


class EvalHook(HookBase):
    """Accuracy of the most confident cell's class on the validation set."""

    def __init__(self, loader):
        self.loader = loader
        self.results = Accumulator(name="eval_results")
        self.latest = None

    @torch.no_grad()
    def evaluate(self):
        model = self.trainer.model
        model.eval()
        for images, targets in self.loader:
            obj, cls, _ = model.predict(images.to(device()))
            cell = obj.flatten(1).argmax(1)
            found = cls.flatten(2).argmax(1).gather(1, cell[:, None])[:, 0].cpu()
            self.results["hits"] += (found == targets["main_class"]).sum().item()
            self.results["n"] += len(images)
        with self.results.synchronized():
            self.latest = float(self.results["hits"] / self.results["n"])
            self.results.clear()

    def after_epoch(self):
        if rank() == 0:
            self.evaluate()  # MISTAKE: collective: loops over an AdaptiveDataLoader and synchronized blocks are for all replicas; on rank 0 alone they wait for the others for ever (or line with: for images, targets in self.loader:) (or line with: with self.results.synchronized():)
            print(f"epoch {self.trainer.epoch}: accuracy {self.latest:.4f}")


class BestCheckpointer(HookBase):
    def __init__(self, eval_hook, out_dir):
        self.eval_hook, self.out_dir = eval_hook, out_dir
        self.best_metric = None

    def before_train(self):
        if rank() == 0:
            with open(os.path.join(self.out_dir, "last_checkpoint"), "w") as file:  # MISTAKE: effect: runs at each start, before the epochs: a restart empties the list of the checkpoints that were saved (or line with: file.write(""))
                file.write("")

    def after_epoch(self):
        if rank() != 0:
            return
        metric = self.eval_hook.latest
        if self.best_metric is None or metric > self.best_metric:
            self.best_metric = metric  # MISTAKE: lost: an attribute that no state keeps: after a restart the next epoch counts as the best one and replaces model_best.pth (or line with: self.best_metric = None) (or line with: if self.best_metric is None or metric > self.best_metric:)
            name = "model_best.pth"
            torch.save(self.trainer.net.state_dict(), os.path.join(self.out_dir, name))
            with open(os.path.join(self.out_dir, "last_checkpoint"), "a") as file:
                file.write(f"{self.trainer.epoch} {name} {metric:.4f}\n")  # ARGUABLE: after the last loop, so it runs once, but a kill may repeat it; a LogFile is meant for this
