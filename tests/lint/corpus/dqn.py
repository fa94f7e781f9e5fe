"""DQN with a replay buffer and a target net."""
import random
from collections import deque, namedtuple

import gymnasium as gym
import torch
import torch.nn as nn
import torch.nn.functional as F

from elasticrun import AdaptiveDataParallel, rank, remaining_steps_until

Transition = namedtuple("Transition", "state action reward next_state done")
BATCH, GAMMA, LR, EPS_END, DECAY, SYNC = 128, 0.99, 1e-4, 0.05, 0.9995, 500


class ReplayMemory:
    def __init__(self, capacity):
        self.memory = deque(maxlen=capacity)

    def push(self, *args):
        self.memory.append(Transition(*args))

    def sample(self, n):
        return Transition(*zip(*random.sample(self.memory, n)))

    def __len__(self):
        return len(self.memory)


def make_net(n_obs, n_act):
    return nn.Sequential(nn.Linear(n_obs, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, n_act))


def main():
    random.seed(rank())
    torch.manual_seed(0)
    env = gym.make("CartPole-v1")
    n_obs, n_act = env.observation_space.shape[0], env.action_space.n
    net, target = make_net(n_obs, n_act), make_net(n_obs, n_act)
    target.load_state_dict(net.state_dict())  # MISTAKE: unreg: the target net is not registered; after a restart it is that of fresh weights until the next sync (or line with: target.load_state_dict(policy.module.state_dict()))
    optimizer = torch.optim.AdamW(net.parameters(), lr=LR, amsgrad=True)
    policy = AdaptiveDataParallel(net, optimizer)
    memory = ReplayMemory(10000)
    epsilon = 0.9
    episode_reward = 0.0
    state, _ = env.reset(seed=rank())
    for step in remaining_steps_until(100000):
        if random.random() < epsilon:
            action = random.randrange(n_act)
        else:
            with torch.no_grad():
                action = net(torch.tensor(state)).argmax().item()
        epsilon = max(EPS_END, epsilon * DECAY)  # MISTAKE: lost: exploration begins at 0.9 again after a restart (or line with: epsilon = 0.9)
        next_state, reward, term, trunc, _ = env.step(action)
        memory.push(state, action, reward, next_state, term)  # MISTAKE: lost: the replay buffer is empty after a restart (or line with: self.memory.append) (or line with: memory = ReplayMemory)
        episode_reward += reward  # ARGUABLE: printed only
        state = next_state  # MISTAKE: lost: the environment and its state begin anew with a restart (or line with: state, _ = env.reset(seed=rank())) (or line with: = env.step(action))
        if term or trunc:
            if rank() == 0:
                print(f"step {step}: reward {episode_reward}")
            state, _ = env.reset()
            episode_reward = 0.0
        if len(memory) < 1000:
            continue
        batch = memory.sample(BATCH)
        s, ns = torch.tensor(batch.state), torch.tensor(batch.next_state)
        a, r, d = torch.tensor(batch.action), torch.tensor(batch.reward), torch.tensor(batch.done)
        q = policy(s).gather(1, a[:, None]).squeeze(1)
        with torch.no_grad():
            y = r + GAMMA * target(ns).max(1).values * (~d)
        loss = F.smooth_l1_loss(q, y.float())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(net.parameters(), 100)
        optimizer.step()
        if step % SYNC == 0:
            target.load_state_dict(policy.module.state_dict())


if __name__ == "__main__":
    main()
