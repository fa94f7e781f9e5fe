"""python main.py config.yaml train.epochs=100 optimizer.lr=0.05"""
import datetime
import json
import sys
from pathlib import Path

import torch
import yaml
from builders import build, build_loaders
from engine import Engine

from elasticrun import Variables, device, rank, remaining_epochs_until


def load_config(argv):
    with open(argv[1]) as f:
        cfg = yaml.safe_load(f)
    for item in argv[2:]:
        path, value = item.split("=", 1)
        node = cfg
        *parents, leaf = path.split(".")
        for key in parents:
            node = node.setdefault(key, {})
        node[leaf] = yaml.safe_load(value)
    return cfg


def run_dir(cfg):
    stamp = datetime.datetime.now().strftime("%Y-%m-%d/%H-%M-%S")  # MISTAKE: zoneP: each restart has another folder, and perhaps each replica (or line with: path = Path("outputs")) (or line with: path.mkdir(parents=True) (or line with: out = run_dir(cfg))
    path = Path("outputs") / cfg["experiment"] / stamp
    path.mkdir(parents=True, exist_ok=True)
    with open(path / "config.yaml", "w") as f:  # MISTAKE: everyrank: all replicas write the same file (or line with: yaml.safe_dump(cfg, f))
        yaml.safe_dump(cfg, f)
    return path


def main():
    cfg = load_config(sys.argv)
    out = run_dir(cfg)
    torch.manual_seed(cfg.get("seed", 0))
    train, valid = build_loaders(cfg)
    net = build("model", cfg["model"]).to(device())
    optimizer = build("optimizer", cfg["optimizer"], net.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, cfg["train"]["epochs"])
    engine = Engine(net, optimizer, scheduler, cfg)
    best = Variables(accuracy=0.0)

    for epoch in remaining_epochs_until(cfg["train"]["epochs"]):
        loss = engine.train_epoch(train)
        if rank() == 0:
            accuracy = engine.validate(valid)  # MISTAKE: collective: the loop over valid is entered by rank 0 only
            print(f"epoch {epoch} loss {loss:.4f} accuracy {accuracy:.4f}")
            with open(out / "metrics.jsonl", "a") as f:  # MISTAKE: effect: rows written after the checkpoint come twice (or line with: f.write(json.dumps)
                f.write(json.dumps({"epoch": epoch, "loss": loss, "accuracy": accuracy}) + "\n")
            if accuracy > best.accuracy:
                best.accuracy = accuracy  # ARGUABLE: only rank 0 sets it, but rank 0's is the one that is saved and read
                engine.export(out / "best.pt")
    engine.export(out / "last.pt")


if __name__ == "__main__":
    main()
