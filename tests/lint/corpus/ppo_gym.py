"""PPO with a vector of environments."""
import argparse
import time

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
from torch.distributions import Categorical
from torch.utils.tensorboard import SummaryWriter

from elasticrun import AdaptiveDataParallel, rank, remaining_steps_until

p = argparse.ArgumentParser()
p.add_argument("--env", default="CartPole-v1")
p.add_argument("--num-envs", type=int, default=4)
p.add_argument("--num-steps", type=int, default=128)
p.add_argument("--total", type=int, default=500000)
p.add_argument("--lr", type=float, default=2.5e-4)
args = p.parse_args()
torch.manual_seed(1)
np.random.seed(1)
run_name = f"{args.env}__{int(time.time())}"  # MISTAKE: name: each start has another folder, so the curves of one job are cut in pieces (or line with: writer = SummaryWriter)
writer = SummaryWriter(f"runs/{run_name}") if rank() == 0 else None


class ActorCritic(nn.Module):
    def __init__(self, n_obs, n_act):
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(n_obs, 64), nn.Tanh(), nn.Linear(64, 1))
        self.actor = nn.Sequential(nn.Linear(n_obs, 64), nn.Tanh(), nn.Linear(64, n_act))

    def forward(self, x, action=None):
        dist = Categorical(logits=self.actor(x))
        if action is None:
            action = dist.sample()
        return action, dist.log_prob(action), dist.entropy(), self.critic(x).squeeze(-1)


envs = gym.vector.SyncVectorEnv([lambda: gym.make(args.env) for _ in range(args.num_envs)])
net = ActorCritic(envs.single_observation_space.shape[0], envs.single_action_space.n)
optimizer = torch.optim.Adam(net.parameters(), lr=args.lr, eps=1e-5)
wrapped = AdaptiveDataParallel(net, optimizer)
N = args.num_steps
num_updates = args.total // (N * args.num_envs)
global_step = 0
next_obs, _ = envs.reset(seed=1)
next_obs = torch.Tensor(next_obs)
next_done = torch.zeros(args.num_envs)

for update in remaining_steps_until(num_updates):
    frac = 1.0 - update / num_updates
    optimizer.param_groups[0]["lr"] = frac * args.lr
    obs = torch.zeros(N, *next_obs.shape)
    actions, logprobs, rewards, dones, values = (torch.zeros(N, args.num_envs) for _ in range(5))
    for step in range(N):
        global_step += args.num_envs  # MISTAKE: lost: counts from 0 after a restart, the x axis jumps back (or line with: global_step = 0)
        obs[step], dones[step] = next_obs, next_done
        with torch.no_grad():
            action, logprobs[step], _, values[step] = net(next_obs)
        actions[step] = action
        next_obs, reward, term, trunc, _ = envs.step(action.numpy())  # MISTAKE: lost: the environments and the last observation are those of a fresh reset after a restart (or line with: next_obs, _ = envs.reset)
        rewards[step] = torch.tensor(reward)
        next_obs, next_done = torch.Tensor(next_obs), torch.Tensor(np.logical_or(term, trunc))  # ARGUABLE: the same as the line of envs.step
    with torch.no_grad():
        nextvalue = net(next_obs)[3]
        adv, last = torch.zeros_like(rewards), 0
        for t in reversed(range(N)):
            alive = 1.0 - (next_done if t == N - 1 else dones[t + 1])
            nv = nextvalue if t == N - 1 else values[t + 1]
            last = rewards[t] + 0.99 * nv * alive - values[t] + 0.99 * 0.95 * alive * last
            adv[t] = last
        returns = adv + values
    b_inds = np.arange(N * args.num_envs)
    flat = obs.flatten(0, 1)
    for _ in range(4):
        np.random.shuffle(b_inds)
        for mb in np.array_split(b_inds, 4):
            _, newlog, ent, newv = wrapped(flat[mb], actions.flatten()[mb].long())
            ratio = (newlog - logprobs.flatten()[mb]).exp()
            a = adv.flatten()[mb]
            a = (a - a.mean()) / (a.std() + 1e-8)
            pg = torch.max(-a * ratio, -a * ratio.clamp(0.8, 1.2)).mean()
            loss = pg - 0.01 * ent.mean() + 0.5 * 0.5 * (newv - returns.flatten()[mb]).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
    if writer:
        writer.add_scalar("charts/return", rewards.sum().item() / args.num_envs, global_step)
        writer.add_scalar("losses/policy", pg.item(), global_step)
envs.close()
