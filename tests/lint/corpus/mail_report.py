"""Reports by mail and to a chat while a forecast model is trained."""
import os
import smtplib
from email.message import EmailMessage

import pandas as pd
import requests
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import Dataset

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, Variables, once, rank, remaining_epochs_until

HOOK = os.environ.get("HOOK", "http://localhost/hook")


def mail(subject, body=""):
    message = EmailMessage()
    message["Subject"], message["To"], message["From"] = subject, "team@example.org", "train@example.org"
    message.set_content(body)
    with smtplib.SMTP("localhost") as server:
        server.send_message(message)


class Series(Dataset):
    def __init__(self, values, window=48):
        self.values, self.window = torch.tensor(values, dtype=torch.float32), window

    def __len__(self):
        return len(self.values) - self.window

    def __getitem__(self, i):
        return self.values[i : i + self.window], self.values[i + self.window]


def main():
    torch.manual_seed(0)
    frame = pd.read_csv("load.csv")
    limit = requests.get(HOOK + "/limit", timeout=5).json()["mse"]
    values = ((frame["load"] - frame["load"].mean()) / frame["load"].std()).to_numpy()
    train = AdaptiveDataLoader(Series(values[:-5000]), batch_size=128, shuffle=True)
    valid = AdaptiveDataLoader(Series(values[-5000:]), batch_size=512)
    net = nn.Sequential(nn.Linear(48, 128), nn.ReLU(), nn.Linear(128, 1), nn.Flatten(0))
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    model = AdaptiveDataParallel(net, optimizer)
    best = Variables(mse=1e9)
    if rank() == 0:
        mail("training has begun")  # MISTAKE: effect: sent again by each start; once("begun")
    for epoch in remaining_epochs_until(50):
        if rank() == 0 and once("epoch"):  # MISTAKE: once: once is collective, but rank 0 alone calls it; once("epoch") and rank() == 0
            requests.post(HOOK, json={"epoch": epoch})
        for x, y in train:
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if once("trained"):
            requests.post(HOOK, json={"trained": epoch})  # MISTAKE: everyrank: all replicas get True from once, so each of them posts (or line with: if once("trained"))
        total = Accumulator()
        with torch.no_grad():
            for x, y in valid:
                total["se"] += (net(x) - y).square()[: valid.num_valid].sum()
        with total.synchronized():
            mse = total["se"] / valid.num_samples
        if mse < best.mse:
            best.mse = mse
            if rank() == 0:
                torch.save(net.state_dict(), "forecast.pt")
        if rank() == 0 and mse < limit:
            print(f"epoch {epoch}: below the limit, {mse:.4f}")
    if once("finished") and rank() == 0:
        mail("training is finished", f"best {best.mse:.5f}")


main()
