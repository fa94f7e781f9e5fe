"""Callbacks that keep what they know in the job's states."""
import time

import torch

from elasticrun import LogFile, Variables, rank


class Callback:
    def on_epoch_begin(self, run):
        pass

    def on_batch_end(self, run, loss):
        pass

    def on_epoch_end(self, run, logs):
        pass


class BestWeights(Callback):
    def __init__(self, path, monitor):
        self.path, self.monitor = path, monitor
        self.state = Variables(name=f"best-{monitor}", value=float("inf"), wait=0)

    def on_epoch_end(self, run, logs):
        if logs[self.monitor] < self.state.value:
            self.state.value = logs[self.monitor]
            self.state.wait = 0
            if rank() == 0:
                torch.save(run.net.state_dict(), self.path)
        else:
            self.state.wait += 1


class Rows(Callback):
    def __init__(self, path):
        self.file = LogFile(path)
        self.file.write("epoch,loss\n")

    def on_epoch_end(self, run, logs):
        self.file.write(f"{run.epoch},{logs['valid']:.5f}\n")


class Progress(Callback):
    """What is shown only; each epoch begins with fresh values."""

    def on_epoch_begin(self, run):
        self.began = time.time()
        self.count = 0

    def on_batch_end(self, run, loss):
        self.count += 1  # ARGUABLE: begins anew where a loop continues, but is printed only
        if rank() == 0 and self.count % 100 == 0:
            print(f"  {self.count / (time.time() - self.began):.1f} batches a second, loss {loss.item():.4f}")
