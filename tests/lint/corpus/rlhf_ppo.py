"""PPO on answers of a small language model against a reward model."""
import argparse
import copy
import json
import logging
from typing import Dict, List, Tuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from elasticrun import AdaptiveDataLoader, AdaptiveDataParallel, device, rank, remaining_epochs_until

logger = logging.getLogger("ppo")


class AdaptiveKLController:
    """See https://arxiv.org/abs/1909.08593, section 2.2."""

    def __init__(self, init_kl_coef: float, target: float, horizon: int):
        self.value, self.target, self.horizon = init_kl_coef, target, horizon

    def update(self, current: float, n_steps: int) -> None:
        error = min(max(current / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * n_steps / self.horizon  # MISTAKE: lost: the coefficient is the initial one again after a restart (and each replica has its own) (or line with: kl_ctl = AdaptiveKLController) (or line with: kl_ctl.update) (or line with: self.value, self.target, self.horizon)


class RunningMoments:
    def __init__(self):
        self.mean, self.var, self.count = 0.0, 1.0, 1e-4

    def update(self, values: torch.Tensor) -> None:
        n, mean, var = len(values), values.mean().item(), values.var(unbiased=False).item()
        delta, total = mean - self.mean, self.count + n
        self.var = (self.var * self.count + var * n + delta**2 * self.count * n / total) / total  # MISTAKE: lost: the scale of rewards begins anew after a restart (and is each replica's own) (or line with: self.mean, self.var, self.count = 0.0) (or line with: moments = RunningMoments()) (or line with: moments.update) (or line with: self.mean, self.count = self.mean)
        self.mean, self.count = self.mean + delta * n / total, total


class Prompts(Dataset):
    def __init__(self, path: str, tokenizer, length: int):
        with open(path) as f:
            self.texts = [json.loads(line)["prompt"] for line in f]
        self.tokenizer, self.length = tokenizer, length

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, i: int) -> Dict[str, torch.Tensor]:
        out = self.tokenizer(self.texts[i], padding="max_length", truncation=True, max_length=self.length, return_tensors="pt")
        return {k: v[0] for k, v in out.items()}


class ActorCritic(nn.Module):
    def __init__(self, name: str):
        super().__init__()
        self.lm = AutoModelForCausalLM.from_pretrained(name)
        self.v_head = nn.Linear(self.lm.config.hidden_size, 1)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, start: int) -> Tuple[torch.Tensor, torch.Tensor]:
        out = self.lm(ids, attention_mask=mask, output_hidden_states=True)
        logp = out.logits[:, start - 1 : -1].log_softmax(-1)
        values = self.v_head(out.hidden_states[-1][:, start - 1 : -1]).squeeze(-1)
        return logp.gather(-1, ids[:, start:, None]).squeeze(-1), values


def advantages_of(rewards: torch.Tensor, values: torch.Tensor, gamma: float = 1.0, lam: float = 0.95):
    last, out = torch.zeros_like(rewards[:, 0]), []
    for t in reversed(range(rewards.shape[1])):
        following = values[:, t + 1] if t + 1 < rewards.shape[1] else 0.0
        last = rewards[:, t] + gamma * following - values[:, t] + gamma * lam * last
        out.append(last)
    advantages = torch.stack(out[::-1], 1)
    return (advantages - advantages.mean()) / (advantages.std() + 1e-8), advantages + values  # ARGUABLE: normalised within the share, so it depends on the cut


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--reward-model", default="lvwerra/distilbert-imdb")
    parser.add_argument("--prompts", default="prompts.jsonl")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--ppo-epochs", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--target-kl", type=float, default=6.0)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    torch.manual_seed(rank())
    dev = device()
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    tokenizer.pad_token = tokenizer.eos_token
    reward_tokenizer = AutoTokenizer.from_pretrained(args.reward_model)
    reward_model = AutoModelForSequenceClassification.from_pretrained(args.reward_model).to(dev).eval()
    policy = ActorCritic(args.model).to(dev)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1.4e-5)
    model = AdaptiveDataParallel(policy, optimizer)
    ref = copy.deepcopy(policy).eval().requires_grad_(False)  # MISTAKE: lost: copied after the wrapping, which loads the checkpoint, so after a restart the reference is the trained policy; copy it before (or line with: model = AdaptiveDataParallel(policy, optimizer))
    prompts = AdaptiveDataLoader(Prompts(args.prompts, tokenizer, 16), batch_size=args.batch_size, shuffle=True, drop_last=True)
    kl_ctl = AdaptiveKLController(0.2, args.target_kl, 10000)
    moments = RunningMoments()

    @torch.no_grad()
    def score(ids: torch.Tensor) -> torch.Tensor:
        texts: List[str] = tokenizer.batch_decode(ids, skip_special_tokens=True)
        inputs = reward_tokenizer(texts, padding=True, truncation=True, return_tensors="pt").to(dev)
        return reward_model(**inputs).logits[:, 1].float()

    for epoch in remaining_epochs_until(args.epochs):
        for batch in prompts:
            ids, mask = batch["input_ids"].to(dev), batch["attention_mask"].to(dev)
            start = ids.shape[1]
            with torch.no_grad():
                ids = policy.lm.generate(ids, attention_mask=mask, do_sample=True, min_new_tokens=args.new_tokens, max_new_tokens=args.new_tokens)
                mask = F.pad(mask, (0, args.new_tokens), value=1)
                old_logp, old_values = policy(ids, mask, start)
                ref_logp, _ = ref(ids, mask, start)
                scores = score(ids)
                moments.update(scores)
                rewards = -kl_ctl.value * (old_logp - ref_logp)
                rewards[:, -1] += (scores - moments.mean) / moments.var**0.5
                advantages, returns = advantages_of(rewards, old_values)
            for _ in range(args.ppo_epochs):
                logp, values = model(ids, mask, start)
                ratio = (logp - old_logp).exp()
                pg_loss = torch.max(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)).mean()
                loss = pg_loss + 0.1 * F.mse_loss(values, returns)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                approx_kl = 0.5 * (logp - old_logp).square().mean().item()
                if approx_kl > 1.5 * 0.1:  # MISTAKE: collective: each replica decides by its own samples, so they step another number of times and wait for each other (or line with: break)
                    break
            kl = (old_logp - ref_logp).sum(1).mean().item()
            kl_ctl.update(kl, args.batch_size)
            if rank() == 0:
                logger.info("epoch %d batch %d kl %.3f reward %.3f", epoch, prompts.batch_index, kl, scores.mean().item())
    if rank() == 0:
        policy.lm.save_pretrained("ppo-model")


if __name__ == "__main__":
    main()
