# PPO for gymnasium control tasks, one file, after CleanRL.
import random
import time
from collections import deque
from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import torch
import tyro
from torch import nn
from torch.distributions import Normal
from torch.utils.tensorboard import SummaryWriter

from elasticrun import AdaptiveDataParallel, device, rank, remaining_steps_until


@dataclass
class Args:
    env_id: str = "HalfCheetah-v4"
    seed: int = 1
    total_timesteps: int = 1_000_000
    learning_rate: float = 3e-4
    num_envs: int = 8
    num_steps: int = 256
    num_minibatches: int = 32
    update_epochs: int = 10
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip: float = 0.2
    target_kl: float | None = 0.02


def layer(n, m, std=np.sqrt(2)):
    linear = nn.Linear(n, m)
    nn.init.orthogonal_(linear.weight, std)
    nn.init.zeros_(linear.bias)
    return linear


class Agent(nn.Module):
    def __init__(self, obs_dim, act_dim):
        super().__init__()
        self.critic = nn.Sequential(layer(obs_dim, 64), nn.Tanh(), layer(64, 64), nn.Tanh(), layer(64, 1, 1.0))
        self.actor = nn.Sequential(layer(obs_dim, 64), nn.Tanh(), layer(64, 64), nn.Tanh(), layer(64, act_dim, 0.01))
        self.logstd = nn.Parameter(torch.zeros(act_dim))

    def forward(self, obs, action=None):
        dist = Normal(self.actor(obs), self.logstd.exp())
        if action is None:
            action = dist.sample()
        return action, dist.log_prob(action).sum(1), dist.entropy().sum(1), self.critic(obs).flatten()


if __name__ == "__main__":
    args = tyro.cli(Args)
    run_name = f"{args.env_id}__{args.seed}"
    writer = SummaryWriter(f"runs/{run_name}")  # MISTAKE: everyrank: each replica writes an event file of its own into the same folder (or line with: writer.add_scalar("charts/return") (or line with: writer.add_scalar("charts/SPS") (or line with: writer.add_scalar("losses/value")

    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)  # MISTAKE: rng: all replicas draw the same actions in the same environments (or line with: np.random.seed(args.seed)) (or line with: random.seed(args.seed)) (or line with: envs.reset(seed=args.seed))

    envs = gym.vector.SyncVectorEnv([lambda: gym.make(args.env_id) for _ in range(args.num_envs)])
    obs_dim, act_dim = envs.single_observation_space.shape[0], envs.single_action_space.shape[0]
    agent = Agent(obs_dim, act_dim).to(device())
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    model = AdaptiveDataParallel(agent, optimizer)

    T, N = args.num_steps, args.num_envs
    obs = torch.zeros(T, N, obs_dim, device=device())
    actions = torch.zeros(T, N, act_dim, device=device())
    logprobs, rewards, dones, values = (torch.zeros(T, N, device=device()) for _ in range(4))
    next_obs = torch.as_tensor(envs.reset(seed=args.seed)[0], dtype=torch.float32, device=device())
    next_done = torch.zeros(N, device=device())
    running = np.zeros(N)
    returns = deque(maxlen=100)
    global_step = 0
    start = time.time()  # ARGUABLE: the time since the restart, for a speed that is only shown
    num_updates = args.total_timesteps // (T * N)

    for update in remaining_steps_until(num_updates):
        optimizer.param_groups[0]["lr"] = (1 - update / num_updates) * args.learning_rate
        for t in range(T):
            global_step += N  # MISTAKE: lost: counts from 0 again after a restart (or line with: global_step = 0) (or line with: writer.add_scalar("charts/return") (or line with: writer.add_scalar("charts/SPS") (or line with: writer.add_scalar("losses/value")
            obs[t], dones[t] = next_obs, next_done
            with torch.no_grad():
                action, logprob, _, value = agent(next_obs)
            actions[t], logprobs[t], values[t] = action, logprob, value
            state, reward, term, trunc, _ = envs.step(action.cpu().numpy())
            done = np.logical_or(term, trunc)
            running += reward  # ARGUABLE: rewards of the episodes that a restart cuts off are lost, with the episodes
            for i in np.flatnonzero(done):
                returns.append(running[i])  # MISTAKE: lost: the last returns are gone after a restart (or line with: returns = deque(maxlen=100)) (or line with: writer.add_scalar("charts/return")
                running[i] = 0.0
            rewards[t] = torch.as_tensor(reward, dtype=torch.float32)
            next_obs = torch.as_tensor(state, dtype=torch.float32, device=device())  # ARGUABLE: the environment itself begins anew as well, so it fits; the episode is cut off
            next_done = torch.as_tensor(done, dtype=torch.float32, device=device())  # ARGUABLE: as above

        with torch.no_grad():
            next_value = agent(next_obs)[3]
        advantages = torch.zeros_like(rewards)
        last = 0
        for t in reversed(range(T)):
            alive = 1.0 - (next_done if t == T - 1 else dones[t + 1])
            following = next_value if t == T - 1 else values[t + 1]
            delta = rewards[t] + args.gamma * following * alive - values[t]
            advantages[t] = last = delta + args.gamma * args.gae_lambda * alive * last
        targets = (advantages + values).flatten()
        flat = obs.flatten(0, 1), actions.flatten(0, 1), logprobs.flatten(), advantages.flatten()

        for _ in range(args.update_epochs):
            for index in torch.randperm(T * N, device=device()).chunk(args.num_minibatches):
                o, a, old, adv = (f[index] for f in flat)
                _, new, entropy, value = model(o, a)
                ratio = (new - old).exp()
                kl = ((ratio - 1) - (new - old)).mean().item()
                adv = (adv - adv.mean()) / (adv.std() + 1e-8)
                policy = torch.max(-adv * ratio, -adv * ratio.clamp(1 - args.clip, 1 + args.clip)).mean()
                v_loss = 0.5 * (value - targets[index]).square().mean()
                optimizer.zero_grad()
                (policy + 0.5 * v_loss - 0.0 * entropy.mean()).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
            if args.target_kl is not None and kl > args.target_kl:  # MISTAKE: collective: each replica leaves by its own kl, the others wait in backward (or line with: kl = ((ratio - 1)) (or line with: break  # enough)
                break  # enough

        if returns:
            writer.add_scalar("charts/return", np.mean(returns), global_step)
        writer.add_scalar("losses/value", v_loss.item(), global_step)
        writer.add_scalar("charts/SPS", int(global_step / (time.time() - start)), global_step)
        if rank() == 0:
            print(f"update {update} return {np.mean(returns) if returns else float('nan'):.1f}")  # ARGUABLE: rank 0's episodes, only printed
    writer.close()
