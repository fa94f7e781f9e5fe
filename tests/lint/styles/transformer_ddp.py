"""Own DDP; loader gives the weight of the loss. FSDP-like wrapper chosen at run time."""
import functools
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import LambdaLR

import elasticrun
from elasticrun import AdaptiveDataLoader, register, remaining_epochs_until


def warmup(step, n):
    return min(1.0, (step + 1) / n)


def make(cfg):
    net = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, batch_first=True), 2)
    head = nn.Linear(64, cfg.classes)
    whole = nn.Sequential(net, head).to(elasticrun.device())
    opt = torch.optim.AdamW(whole.parameters(), lr=cfg.lr)
    sched = LambdaLR(opt, functools.partial(warmup, n=cfg.warmup))
    register(model=whole, optimizer=opt, scheduler=sched)
    return DDP(whole), opt, sched


def reduce_mean(t):
    dist.all_reduce(t)
    return t / elasticrun.world_size()


def main(cfg, train_set):
    elasticrun.init()
    torch.manual_seed(cfg.seed)
    ddp, opt, sched = make(cfg)
    loader = AdaptiveDataLoader(train_set, cfg.batch_size, shuffle=True, collate_fn=cfg.collate)
    for epoch in remaining_epochs_until(cfg.epochs):
        ddp.train()
        for step, batch in loader.enumerate():
            out = ddp(batch["x"]).mean(1)
            loss = nn.functional.cross_entropy(out, batch["y"]) * loader.loss_weight
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
            if step % 20 == 0:
                mean = reduce_mean(loss.detach().clone())
                if elasticrun.rank() == 0:
                    print(f"{epoch}/{step}: {mean.item():.4f}")
        dist.barrier()
