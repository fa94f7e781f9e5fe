"""REINFORCE on CartPole, an episode a step."""
import argparse
from collections import deque

import gymnasium as gym
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Categorical

from elasticrun import AdaptiveDataParallel, rank, remaining_steps_until

parser = argparse.ArgumentParser()
parser.add_argument("--gamma", type=float, default=0.99)
parser.add_argument("--seed", type=int, default=543)
parser.add_argument("--episodes", type=int, default=2000)
args = parser.parse_args()

env = gym.make("CartPole-v1")
env.reset(seed=args.seed)
torch.manual_seed(args.seed)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1 = nn.Linear(4, 128)
        self.affine2 = nn.Linear(128, 2)

    def forward(self, x):
        return F.softmax(self.affine2(F.relu(self.affine1(x))), dim=1)


net = Policy()
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
policy = AdaptiveDataParallel(net, optimizer)


def select_action(state, log_probs):
    m = Categorical(policy(torch.from_numpy(state).float().unsqueeze(0)))
    action = m.sample()
    log_probs.append(m.log_prob(action))
    return action.item()


def finish_episode(rewards, log_probs):
    R = 0
    returns = deque()
    for r in rewards[::-1]:
        R = r + args.gamma * R
        returns.appendleft(R)
    returns = torch.tensor(returns)
    returns = (returns - returns.mean()) / (returns.std() + 1e-6)
    loss = torch.cat([-lp * r for lp, r in zip(log_probs, returns)]).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


running_reward = 10
for i_episode in remaining_steps_until(args.episodes):
    rewards, log_probs = [], []
    state, _ = env.reset()  # MISTAKE: rng: the environment's own generator is seeded anew by each start and repeats its episodes (or line with: env.reset(seed=args.seed))
    for t in range(1, 10000):
        state, reward, done, truncated, _ = env.step(select_action(state, log_probs))
        rewards.append(reward)
        if done or truncated:
            break
    running_reward = 0.05 * sum(rewards) + 0.95 * running_reward  # MISTAKE: lost: the running reward is 10 again after a restart
    finish_episode(rewards, log_probs)
    if i_episode % 10 == 0 and rank() == 0:
        print(f"episode {i_episode} last {sum(rewards):.1f} average {running_reward:.2f}")
    if running_reward > env.spec.reward_threshold:
        break  # MISTAKE: collective: each replica has a running reward of its own, so they leave at different steps (or line with: if running_reward > env.spec)
