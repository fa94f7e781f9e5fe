"""DQN on MinAtar with a replay buffer and a target network."""
import argparse
import copy
import csv
import random
from collections import deque

import numpy as np
import torch
import torch.nn.functional as F
from minatar import Environment
from torch import nn

from elasticrun import AdaptiveDataParallel, LogFile, Variables, device, rank, remaining_steps_until


class ReplayBuffer:
    def __init__(self, capacity):
        self.memory = deque(maxlen=capacity)

    def push(self, *transition):
        self.memory.append(transition)  # MISTAKE: lost: the buffer is empty after a restart (or line with: self.memory = deque(maxlen=capacity)) (or line with: self.buffer = ReplayBuffer) (or line with: agent.buffer.push(state) (or line with: random.sample(self.memory, n)) (or line with: self.buffer.sample(self.args.batch_size))

    def sample(self, n):
        state, action, reward, following, done = zip(*random.sample(self.memory, n))
        as_tensor = lambda rows, kind: torch.as_tensor(np.array(rows), dtype=kind, device=device())
        return (
            as_tensor(state, torch.float32),
            as_tensor(action, torch.int64),
            as_tensor(reward, torch.float32),
            as_tensor(following, torch.float32),
            as_tensor(done, torch.float32),
        )

    def __len__(self):
        return len(self.memory)


class QNet(nn.Module):
    def __init__(self, channels, actions):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(channels, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 128), nn.ReLU())
        self.head = nn.Linear(128, actions)

    def forward(self, x):
        return self.head(self.body(x.permute(0, 3, 1, 2)))


class Agent:
    def __init__(self, args, env):
        self.args = args
        self.actions = env.num_actions()
        net = QNet(env.state_shape()[2], self.actions).to(device())
        self.target = copy.deepcopy(net).requires_grad_(False)  # MISTAKE: unreg: the target network is in no checkpoint (or line with: self.target.load_state_dict)
        self.optimizer = torch.optim.RMSprop(net.parameters(), lr=args.lr, alpha=0.95, centered=True, eps=0.01)
        self.model = AdaptiveDataParallel(net, self.optimizer)
        self.buffer = ReplayBuffer(args.capacity)
        self.epsilon = 1.0

    @torch.no_grad()
    def act(self, state, epsilon):
        if random.random() < epsilon:
            return random.randrange(self.actions)
        x = torch.as_tensor(state, dtype=torch.float32, device=device())[None]
        return self.model.module(x).argmax(1).item()

    def decay(self):
        self.epsilon = max(0.1, self.epsilon - 0.9 / self.args.explore)  # MISTAKE: lost: begins at 1.0 again after a restart (or line with: self.epsilon = 1.0) (or line with: agent.decay()) (or line with: agent.act(state, agent.epsilon))

    def learn(self):
        state, action, reward, following, done = self.buffer.sample(self.args.batch_size)
        q = self.model(state).gather(1, action[:, None]).squeeze(1)
        goal = reward + 0.99 * (1 - done) * self.target(following).max(1).values
        loss = F.smooth_l1_loss(q, goal)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def sync(self):
        self.target.load_state_dict(self.model.module.state_dict())


def play(agent, game, episodes=10):
    env, scores = Environment(game), []
    for _ in range(episodes):
        env.reset()
        done, score = False, 0.0
        while not done:
            reward, done = env.act(agent.act(env.state(), 0.01))
            score += reward
        scores.append(score)
    return float(np.mean(scores))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--game", default="breakout")
    parser.add_argument("--frames", type=int, default=2_000_000)
    parser.add_argument("--capacity", type=int, default=100_000)
    parser.add_argument("--explore", type=int, default=100_000)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=2.5e-4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    random.seed(args.seed + rank())
    np.random.seed(args.seed + rank())
    torch.manual_seed(args.seed + rank())

    env = Environment(args.game, random_seed=args.seed + rank())  # ARGUABLE: the game and its generator begin anew after a restart; the episode is cut off
    agent = Agent(args, env)
    stats = Variables(best=float("-inf"), best_step=0)
    rows = csv.writer(LogFile("evaluations.csv"))
    rows.writerow(["frame", "score"])

    env.reset()
    for frame in remaining_steps_until(args.frames):
        state = env.state()
        action = agent.act(state, agent.epsilon)
        reward, done = env.act(action)
        agent.buffer.push(state, action, reward, env.state(), done)
        if done:
            env.reset()
        agent.decay()
        if len(agent.buffer) >= 5000:
            agent.learn()
        if frame % 1000 == 0:
            agent.sync()
        if frame % 50_000 == 0 and rank() == 0:
            score = play(agent, args.game)
            rows.writerow([frame, score])
            if score > stats.best:
                stats.best, stats.best_step = score, frame  # ARGUABLE: only rank 0 sets it, which warns; but rank 0's is the one that is saved and read
                torch.save(agent.model.module.state_dict(), f"{args.game}_best.pt")


if __name__ == "__main__":
    main()
