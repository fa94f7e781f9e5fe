"""Evolution strategies: members of a population are played on all replicas."""
import argparse
import math
from typing import List, Optional

import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from elasticrun import LogFile, Variables, init, rank, register, remaining_steps_until, world_size


def make_policy(env: gym.Env, hidden: int = 32) -> nn.Sequential:
    inputs, outputs = env.observation_space.shape[0], env.action_space.n
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs)).requires_grad_(False)


def play(env: gym.Env, policy: nn.Module, seed: int, max_steps: int = 500) -> float:
    observation, _ = env.reset(seed=seed)
    total = 0.0
    for _ in range(max_steps):
        action = policy(torch.as_tensor(observation, dtype=torch.float32)).argmax().item()
        observation, reward, terminated, truncated, _ = env.step(action)
        total += float(reward)
        if terminated or truncated:
            break
    return total


def noise_of(seed: int, step: int, member: int, size: int) -> torch.Tensor:
    """The same at any number of replicas, since only numbers of the job go in."""
    rng = np.random.default_rng([seed, step, member])
    return torch.from_numpy(rng.standard_normal(size).astype(np.float32))


def all_sum(values: torch.Tensor) -> torch.Tensor:
    if world_size() > 1:
        dist.all_reduce(values)
    return values


def centered_ranks(returns: torch.Tensor) -> torch.Tensor:
    order = returns.argsort(stable=True)
    ranks = torch.empty_like(returns)
    ranks[order] = torch.linspace(-0.5, 0.5, len(returns), dtype=returns.dtype)
    return ranks


class EarlyEnd:
    """Counts steps without progress; kept by `register`."""

    def __init__(self, patience: int):
        self.patience, self.best, self.waited = patience, -math.inf, 0

    def state_dict(self) -> dict:
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: dict) -> None:
        self.best, self.waited = state["best"], state["waited"]

    def __call__(self, value: float) -> bool:
        if value > self.best:
            self.best, self.waited = value, 0
        else:
            self.waited += 1
        return self.waited >= self.patience


def main(argv: Optional[List[str]] = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--population", type=int, default=64)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--sigma", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--patience", type=int, default=50)
    args = parser.parse_args(argv)
    init(save_interval=60)
    torch.manual_seed(args.seed)
    env = gym.make(args.env)
    policy, trial = make_policy(env), make_policy(env)
    center = nn.Parameter(parameters_to_vector(policy.parameters()))
    optimizer = torch.optim.Adam([center], lr=args.lr)
    vector = nn.ParameterList([center])
    end = EarlyEnd(args.patience)
    register(vector=vector, optimizer=optimizer, end=end)
    best = Variables(mean=-math.inf)
    log = LogFile("evolution.log")
    for step in remaining_steps_until(args.steps):
        returns = torch.zeros(args.population, dtype=torch.float64)
        for member in range(rank(), args.population, world_size()):
            change = args.sigma * noise_of(args.seed, step, member // 2, len(center)) * (1 - 2 * (member % 2))
            vector_to_parameters(center.detach() + change, trial.parameters())
            returns[member] = play(env, trial, seed=1000 * step + member // 2)
        returns = all_sum(returns)
        shaped = centered_ranks(returns)
        gradient = torch.zeros(len(center))
        for pair in range(args.population // 2):
            weight = float(shaped[2 * pair] - shaped[2 * pair + 1])
            gradient += weight * noise_of(args.seed, step, pair, len(center))
        center.grad = -gradient / (args.population * args.sigma)
        optimizer.step()
        mean = returns.mean().item()
        log.write(f"{step} {mean:.1f} {returns.max().item():.1f}\n")
        if mean > best.mean:
            best.mean = mean
            if rank() == 0:
                torch.save(center.detach(), "center.pt")
        if end(mean):
            break  # ARGUABLE: a restart after this break might go on with the next step
    vector_to_parameters(center.detach(), policy.parameters())
    if rank() == 0:
        torch.save(policy.state_dict(), "policy.pt")
        print(f"best mean {best.mean:.1f}, test {play(env, policy, seed=10**6):.1f}")


if __name__ == "__main__":
    main()
