"""Soft actor-critic on a pendulum, each replica with an environment of its own.

One step of the job is one episode of 200 steps followed by as many updates.
"""
import argparse
import copy
import csv

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from elasticrun import Accumulator, AdaptiveDataParallel, LogFile, Variables, atomic_save, rank, register
from elasticrun import remaining_steps_until, world_size


class Pendulum:
    length = 200

    def reset(self):
        self.theta, self.speed = np.random.uniform([-np.pi, -1.0], [np.pi, 1.0])
        return self.observe()

    def observe(self):
        return np.array([np.cos(self.theta), np.sin(self.theta), self.speed], dtype=np.float32)

    def step(self, action):
        u = float(np.clip(2.0 * action[0], -2.0, 2.0))
        angle = (self.theta + np.pi) % (2 * np.pi) - np.pi
        cost = angle**2 + 0.1 * self.speed**2 + 0.001 * u**2
        self.speed = np.clip(self.speed + (15.0 * np.sin(self.theta) + 3.0 * u) * 0.05, -8, 8)
        self.theta += self.speed * 0.05
        return self.observe(), -cost


class ReplayBuffer:
    def __init__(self, obs_dim, act_dim, capacity, seed):
        self.obs = np.zeros((capacity, obs_dim), dtype=np.float32)
        self.next_obs = np.zeros((capacity, obs_dim), dtype=np.float32)
        self.action = np.zeros((capacity, act_dim), dtype=np.float32)
        self.reward = np.zeros(capacity, dtype=np.float32)
        self.ptr, self.size, self.capacity = 0, 0, capacity
        self.rng = np.random.default_rng(seed)  # MISTAKE: rng: a generator of its own is in no checkpoint: after a restart it draws the same indices from the start again (or line with: idx = self.rng.integers(self.size, size=batch_size))

    def store(self, obs, action, reward, next_obs):
        i = self.ptr
        self.obs[i], self.action[i], self.reward[i], self.next_obs[i] = obs, action, reward, next_obs
        self.ptr = (i + 1) % self.capacity
        self.size = min(self.size + 1, self.capacity)

    def sample(self, batch_size):
        idx = self.rng.integers(self.size, size=batch_size)
        return [torch.from_numpy(a[idx]) for a in (self.obs, self.action, self.reward, self.next_obs)]


def mlp(i, o, hidden=256):
    return nn.Sequential(nn.Linear(i, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, o))


class Actor(nn.Module):
    def __init__(self, obs_dim, act_dim):
        super().__init__()
        self.body = mlp(obs_dim, 2 * act_dim)

    def forward(self, obs, deterministic=False):
        mu, log_std = self.body(obs).chunk(2, dim=-1)
        dist = torch.distributions.Normal(mu, log_std.clamp(-20, 2).exp())
        u = mu if deterministic else dist.rsample()
        logp = dist.log_prob(u).sum(-1) - (2 * (np.log(2) - u - F.softplus(-2 * u))).sum(-1)
        return torch.tanh(u), logp


class Critic(nn.Module):
    def __init__(self, obs_dim, act_dim):
        super().__init__()
        self.q = mlp(obs_dim + act_dim, 2)

    def forward(self, obs, action):
        return self.q(torch.cat([obs, action], dim=-1)).unbind(-1)


class SAC:
    def __init__(self, env, args):
        self.env, self.args = env, args
        actor, critic = Actor(3, 1), Critic(3, 1)
        self.actor_opt = torch.optim.Adam(actor.parameters(), lr=args.lr)
        self.critic_opt = torch.optim.Adam(critic.parameters(), lr=args.lr)
        self.target = copy.deepcopy(critic).requires_grad_(False)
        self.actor = AdaptiveDataParallel(actor, self.actor_opt, name="actor")
        self.critic = AdaptiveDataParallel(critic, self.critic_opt, name="critic")
        register(target=self.target)
        self.buffer = ReplayBuffer(3, 1, args.capacity, args.seed + rank())  # MISTAKE: unreg: the transitions are in no checkpoint: after a restart the updates go on from an empty buffer; needs a State with is_per_replica (or line with: self.obs = np.zeros((capacity, obs_dim), dtype=np.float32)) (or line with: self.buffer.store(obs, action, reward, next_obs)) (or line with: self.ptr, self.size, self.capacity = 0, 0, capacity) (or line with: self.ptr = (i + 1) % self.capacity) (or line with: self.size = min(self.size + 1, self.capacity)) (or line with: self.obs[i], self.action[i])

    @torch.no_grad()
    def act(self, obs, deterministic=False):
        action, _ = self.actor.module(torch.from_numpy(obs)[None], deterministic)
        return action[0].numpy()

    def episode(self, explore):
        obs, total = self.env.reset(), 0.0
        for _ in range(self.env.length):
            action = np.random.uniform(-1, 1, 1) if explore else self.act(obs)
            next_obs, reward = self.env.step(action)
            self.buffer.store(obs, action, reward, next_obs)
            obs, total = next_obs, total + reward
        return total

    def update(self):
        args = self.args
        obs, action, reward, next_obs = self.buffer.sample(args.batch_size)
        with torch.no_grad():
            next_action, logp = self.actor.module(next_obs)
            soft = torch.min(*self.target(next_obs, next_action)) - args.alpha * logp
            backup = reward + args.gamma * soft
        q1, q2 = self.critic(obs, action)
        loss_q = F.mse_loss(q1, backup) + F.mse_loss(q2, backup)
        self.critic_opt.zero_grad()
        loss_q.backward()
        self.critic_opt.step()

        self.critic.requires_grad_(False)
        new_action, logp = self.actor(obs)
        loss_pi = (args.alpha * logp - torch.min(*self.critic.module(obs, new_action))).mean()
        self.actor_opt.zero_grad()
        loss_pi.backward()
        self.actor_opt.step()
        self.critic.requires_grad_(True)

        with torch.no_grad():
            for p, t in zip(self.critic.parameters(), self.target.parameters()):
                t.lerp_(p, 1 - args.polyak)


def main():
    parser = argparse.ArgumentParser()
    for name, default in dict(
        episodes=400, explore=5, capacity=100_000, batch_size=128, lr=1e-3,
        alpha=0.2, gamma=0.99, polyak=0.995, solved=-160.0, seed=0,
    ).items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    args = parser.parse_args()
    torch.manual_seed(args.seed + rank())
    np.random.seed(args.seed + rank())
    agent = SAC(Pendulum(), args)
    stats = Variables(running=-1200.0, best=-1e9)
    returns = Accumulator(name="returns")
    rows = csv.writer(LogFile("returns.csv"))
    rows.writerow(["episode", "mean_return"])
    for episode in remaining_steps_until(args.episodes):
        episode_return = agent.episode(explore=episode < args.explore)
        for _ in range(agent.env.length):
            agent.update()
        returns["sum"] += episode_return / world_size()
        with returns.synchronized():
            mean_return = float(returns["sum"])
            returns.clear()
        rows.writerow([episode, f"{mean_return:.1f}"])
        if mean_return > stats.best:
            stats.best = mean_return
            if rank() == 0:
                atomic_save(agent.actor.state_dict(), "actor_best.pt")
        stats.running = 0.95 * stats.running + 0.05 * episode_return  # MISTAKE: vars: episode_return is this replica's own, so the Variables differ by rank, and the break below is taken by some replicas only: the others hang (or line with: if stats.running > args.solved:)
        if stats.running > args.solved:
            break
    if rank() == 0:
        print(f"best mean return {stats.best:.1f}")


if __name__ == "__main__":
    main()
