"""Keras-like callbacks."""
import os

import requests
import torch

from elasticrun import rank


class Callback:
    def on_epoch_begin(self, run):
        pass

    def on_train_end(self, run):
        pass

    def on_epoch_end(self, run, logs):
        pass


class EarlyStopping(Callback):
    def __init__(self, monitor, patience):
        self.monitor, self.patience = monitor, patience
        self.best = None
        self.wait = 0

    def on_epoch_end(self, run, logs):
        value = logs[self.monitor]
        if self.best is None or value < self.best:
            self.best = value  # MISTAKE: lost: the callback forgets the best value (or line with: self.best = None) (or line with: if self.best is None)
            self.wait = 0
        else:
            self.wait += 1  # MISTAKE: lost: the callback forgets how long it waits (or line with: self.wait = 0) (or line with: if self.wait >= self.patience)
            if self.wait >= self.patience:
                run.stop = True


class ModelCheckpoint(Callback):
    def __init__(self, folder):
        self.folder = folder
        os.makedirs(folder, exist_ok=True)

    def on_epoch_begin(self, run):
        last = os.path.join(self.folder, "last.pt")
        if rank() == 0 and os.path.exists(last):
            os.rename(last, os.path.join(self.folder, "previous.pt"))  # ARGUABLE: in front of the loops; the second time there is no last.pt, so nothing happens

    def on_epoch_end(self, run, logs):
        if rank() == 0:
            torch.save(run.net.state_dict(), os.path.join(self.folder, "last.pt"))


class Notifier(Callback):
    def __init__(self, url):
        self.url = url

    def on_train_end(self, run):
        requests.post(self.url, json={"text": f"epoch {run.epoch}: training part done"})  # MISTAKE: effect: called between the loops, so posted again after a restart in the validation, and by each replica


class History(Callback):
    def __init__(self):
        self.rows = []

    def on_epoch_end(self, run, logs):
        self.rows.append({"epoch": run.epoch, **logs})  # MISTAKE: lost: rows of before the restart are missing in the summary (or line with: self.rows = [])
