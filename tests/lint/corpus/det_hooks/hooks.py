"""Hooks of a trainer."""
import json
import os
import time

import torch

from elasticrun import rank


class HookBase:
    trainer = None

    def before_train(self):
        pass

    def before_epoch(self):
        pass

    def after_step(self):
        pass

    def after_epoch(self):
        pass

    def after_train(self):
        pass


class IterationTimer(HookBase):
    def before_epoch(self):
        self.start = time.perf_counter()

    def after_epoch(self):
        if rank() == 0:
            print(f"epoch took {time.perf_counter() - self.start:.1f} s")


class JsonWriter(HookBase):
    def __init__(self, path):
        self.path = path

    def before_train(self):
        self.file = open(self.path, "w")  # MISTAKE: effect: each start empties the file of metrics (and each replica does)

    def after_epoch(self):
        if rank() == 0:
            self.file.write(json.dumps({"epoch": self.trainer.epoch, "AP": self.trainer.ap}) + "\n")
            self.file.flush()

    def after_train(self):
        self.file.close()


class BestCheckpointer(HookBase):
    def __init__(self, folder):
        self.folder = folder
        self.best = None

    def after_epoch(self):
        if self.best is None or self.trainer.ap > self.best:
            self.best = self.trainer.ap  # MISTAKE: lost: the hook forgets its best value with a restart (or line with: self.best = None)
            if rank() == 0:
                torch.save(self.trainer.net.state_dict(), os.path.join(self.folder, "model_best.pth"))


class Announce(HookBase):
    def before_epoch(self):
        if rank() == 0:
            with open("status.log", "a") as f:  # MISTAKE: effect: before the loops of the epoch, so a restart within it appends the line again
                f.write(f"epoch {self.trainer.epoch} begins\n")


class FreezeBackbone(HookBase):
    def __init__(self, until):
        self.until = until

    def before_epoch(self):
        frozen = self.trainer.epoch < self.until
        for p in self.trainer.net.backbone.parameters():
            p.requires_grad_(not frozen)
