"""A trainer in fairseq's manner: train_step, valid_step, reduced logging outputs."""
import torch

from elasticrun import AdaptiveDataParallel, Variables, device


class Trainer:
    def __init__(self, args, model, criterion):
        self.args = args
        self.criterion = criterion
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.01)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.polynomial)
        self.model = AdaptiveDataParallel(model.to(device()), self.optimizer, self.scheduler)
        self.state = Variables(name="trainer", num_updates=0, best_loss=float("inf"))
        self.model.module.set_num_updates(self.state.num_updates)

    def polynomial(self, step):
        args = self.args
        if step < args.warmup_updates:
            return (step + 1) / args.warmup_updates
        return max(0.0, 1.0 - (step - args.warmup_updates) / (args.max_update - args.warmup_updates))

    def get_num_updates(self):
        return self.state.num_updates

    def set_num_updates(self, num_updates):
        self.state.num_updates = num_updates
        self.model.module.set_num_updates(num_updates)

    def train_step(self, sample):
        self.model.train()
        source, mask = (t.to(device()) for t in sample)
        self.optimizer.zero_grad()
        loss, sample_size, logging_output = self.criterion(self.model, source, mask)
        loss = loss / max(sample_size, 1)
        loss.backward()  # MISTAKE: weigh: sample_size is this replica's number of masked frames, so the mean of these means isn't that of all frames; needs model.weigh(loss, count=sample_size) (or line with: loss = loss / max(sample_size, 1))
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip_norm)
        self.optimizer.step()
        self.scheduler.step()
        self.set_num_updates(self.get_num_updates() + 1)  # MISTAKE: cut: runs once per micro-batch (the loader has max_local_batch_size), not once per step: the Gumbel temperature falls faster with fewer replicas; ask is_step first (or line with: self.state.num_updates = num_updates) (or line with: self.model.module.set_num_updates(num_updates))
        return logging_output

    @torch.no_grad()
    def valid_step(self, sample):
        self.model.eval()
        source, mask = (t.to(device()) for t in sample)
        return self.criterion(self.model, source, mask)[2]
