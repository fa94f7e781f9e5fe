"""Config-driven, objects made by instantiate(), a run directory, resume by itself."""
import logging
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import hydra
import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn, optim

import elasticrun

log = logging.getLogger(__name__)


@dataclass
class TrainState:
    best: float = float("inf")
    since_best: int = 0
    history: list = field(default_factory=list)

    def state_dict(self):
        return asdict(self)

    def load_state_dict(self, state):
        self.__dict__.update(state)


def build_optimizer(cfg: DictConfig, params) -> optim.Optimizer:
    kinds = {"sgd": optim.SGD, "adamw": optim.AdamW}
    return kinds[cfg.name](params, lr=cfg.lr, weight_decay=cfg.weight_decay)


def build_scheduler(cfg: DictConfig, optimizer: optim.Optimizer, epochs: int):
    if cfg.name == "cosine":
        return optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
    elif cfg.name == "step":
        return optim.lr_scheduler.MultiStepLR(optimizer, milestones=cfg.milestones)
    raise ValueError(cfg.name)


@torch.no_grad()
def evaluate(model: nn.Module, loader: Any, total: elasticrun.Accumulator) -> float:
    was_training = model.training
    model.eval()
    for x, y in loader:
        out = model(x)
        n = loader.num_valid
        total["loss"] += nn.functional.cross_entropy(out[:n], y[:n], reduction="sum")
        total["n"] += n
    model.train(was_training)
    with total.synchronized():
        result = float(total["loss"]) / total["n"]
        total.clear()
    return result


@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(cfg: DictConfig) -> float:
    log.info("\n%s", OmegaConf.to_yaml(cfg))
    run_dir = Path(hydra.core.hydra_config.HydraConfig.get().runtime.output_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(cfg.seed)
    elasticrun.init(str(run_dir / "elastic"))
    model = hydra.utils.instantiate(cfg.model).to(elasticrun.device())
    optimizer = build_optimizer(cfg.optimizer, model.parameters())
    scheduler = build_scheduler(cfg.scheduler, optimizer, cfg.epochs)
    state = TrainState()
    elasticrun.register(train_state=state)
    ddp = elasticrun.AdaptiveDataParallel(model, optimizer, scheduler)
    train_set = hydra.utils.instantiate(cfg.data.train)
    valid_set = hydra.utils.instantiate(cfg.data.valid)
    train_dl = elasticrun.AdaptiveDataLoader(train_set, cfg.batch_size, shuffle=True, seed=cfg.seed)
    valid_dl = elasticrun.AdaptiveDataLoader(valid_set, cfg.batch_size)
    total = elasticrun.Accumulator()

    for epoch in elasticrun.remaining_epochs_until(cfg.epochs):
        if state.since_best >= cfg.patience:
            log.info("early stop")
            break
        for x, y in train_dl:
            optimizer.zero_grad(set_to_none=True)
            loss = nn.functional.cross_entropy(ddp(x), y)
            loss.backward()
            if cfg.clip:
                nn.utils.clip_grad_norm_(model.parameters(), cfg.clip)
            optimizer.step()
        val = evaluate(ddp, valid_dl, total)
        scheduler.step()
        state.history.append(val)
        if val < state.best:
            state.best, state.since_best = val, 0
            if elasticrun.rank() == 0:
                torch.save(model.state_dict(), run_dir / "best.pt")
        else:
            state.since_best += 1
        log.info("epoch %d: %.4f (best %.4f)", epoch, val, state.best)
    return state.best


if __name__ == "__main__":
    main()
