"""Actor-critic, ported: each episode is a step, and its seed follows from its number."""
import gymnasium as gym
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from elasticrun import AdaptiveDataParallel, Variables, rank, remaining_steps_until, world_size

GAMMA = 0.99
SEED = 7


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 128)
        self.actor = nn.Linear(128, 2)
        self.critic = nn.Linear(128, 1)

    def forward(self, x):
        h = F.relu(self.body(x))
        return F.log_softmax(self.actor(h), -1), self.critic(h).squeeze(-1)


def mean_over_replicas(value):
    tensor = torch.tensor(float(value), dtype=torch.float64)
    if world_size() > 1:
        dist.all_reduce(tensor)
    return tensor.item() / world_size()


def play(env, net, seed):
    states, actions, rewards = [], [], []
    state, _ = env.reset(seed=seed)
    over = False
    while not over:
        with torch.no_grad():
            logits, _ = net(torch.as_tensor(state))
        action = int(torch.multinomial(logits.exp(), 1))
        states.append(torch.as_tensor(state))
        actions.append(action)
        state, reward, terminated, truncated, _ = env.step(action)
        rewards.append(reward)
        over = terminated or truncated
    return torch.stack(states), torch.tensor(actions), rewards


def discounted(rewards):
    total, out = 0.0, []
    for r in reversed(rewards):
        total = r + GAMMA * total
        out.insert(0, total)
    out = torch.tensor(out)
    return (out - out.mean()) / (out.std() + 1e-6)


def main():
    torch.manual_seed(SEED + rank())
    env = gym.make("CartPole-v1")
    net = ActorCritic()
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-2)
    model = AdaptiveDataParallel(net, optimizer)
    progress = Variables(reward=10.0)
    for episode in remaining_steps_until(1000):
        if progress.reward > 475:
            continue
        states, actions, rewards = play(env, net, SEED + episode)
        returns = discounted(rewards)
        logits, values = model(states)
        advantage = returns - values.detach()
        policy_loss = -(logits[torch.arange(len(actions)), actions] * advantage).mean()
        loss = policy_loss + F.smooth_l1_loss(values, returns)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        reward = mean_over_replicas(sum(rewards))
        progress.reward = 0.05 * reward + 0.95 * progress.reward
        if rank() == 0 and episode % 10 == 0:
            print(f"episode {episode}: {reward:.1f}, average {progress.reward:.1f}")


if __name__ == "__main__":
    main()
