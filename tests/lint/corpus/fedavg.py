"""Federated averaging, simulated: clients train one after another within a round."""
import argparse
import copy
import csv
from typing import Dict, List

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import Subset
from torchvision import datasets, transforms

from elasticrun import Accumulator, AdaptiveDataLoader, device, rank, register, remaining_epochs_until


class CNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 5, padding=2), nn.Conv2d(32, 64, 5, padding=2)
        self.fc1, self.fc2 = nn.Linear(7 * 7 * 64, 512), nn.Linear(512, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def dirichlet_split(targets: np.ndarray, num_clients: int, alpha: float, seed: int) -> List[List[int]]:
    rng = np.random.default_rng(seed)
    parts: List[List[int]] = [[] for _ in range(num_clients)]
    for label in np.unique(targets):
        where = rng.permutation(np.flatnonzero(targets == label))
        cuts = (np.cumsum(rng.dirichlet([alpha] * num_clients))[:-1] * len(where)).astype(int)
        for part, piece in zip(parts, np.split(where, cuts)):
            part.extend(piece.tolist())
    return parts


def average(states: List[Dict[str, torch.Tensor]], weights: List[int]) -> Dict[str, torch.Tensor]:
    total = float(sum(weights))
    return {key: sum(state[key] * (w / total) for state, w in zip(states, weights)) for key in states[0]}


def local_update(net: nn.Module, loader: AdaptiveDataLoader, epochs: int, lr: float, dev: torch.device) -> None:
    net.train()
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.5)  # ARGUABLE: its momentum is lost as the client's net is, marked where that is made
    for _ in range(epochs):
        for x, y in loader:
            loss = F.cross_entropy(net(x.to(dev)), y.to(dev))
            optimizer.zero_grad()
            loss.backward()  # ARGUABLE: gradients are not averaged over replicas, marked where the client's net is made
            optimizer.step()  # ARGUABLE: the same


@torch.no_grad()
def test(net: nn.Module, loader: AdaptiveDataLoader, dev: torch.device) -> float:
    net.eval()
    total = Accumulator()
    for x, y in loader:
        total["hits"] += (net(x.to(dev)).argmax(1).cpu() == y).sum()
        total["n"] += len(y)
    with total.synchronized():
        return total["hits"] / total["n"]


def args_parser() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--num-users", type=int, default=100)
    parser.add_argument("--frac", type=float, default=0.1)
    parser.add_argument("--local-ep", type=int, default=5)
    parser.add_argument("--local-bs", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--alpha", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    args = args_parser()
    torch.manual_seed(args.seed)
    np.random.seed(args.seed)
    dev = device()
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize(0.1307, 0.3081)])
    train_set = datasets.MNIST("data", train=True, transform=transform)
    test_set = datasets.MNIST("data", train=False, transform=transform)
    parts = dirichlet_split(train_set.targets.numpy(), args.num_users, args.alpha, args.seed)
    clients = [AdaptiveDataLoader(Subset(train_set, part), batch_size=args.local_bs, shuffle=True, name=f"client{k}") for k, part in enumerate(parts)]
    test_loader = AdaptiveDataLoader(test_set, batch_size=512, even_batches=False, name="test")
    net_glob = CNN().to(dev)
    register(net_glob=net_glob)

    log = writer = None
    if rank() == 0:
        log = open("fedavg.csv", "w")  # MISTAKE: effect: each start empties the file, rounds of before the restart are gone; a LogFile
        writer = csv.writer(log)  # ARGUABLE: the same file
        writer.writerow(["round", "clients", "accuracy"])  # ARGUABLE: the header of the file that is marked above
    for rnd in remaining_epochs_until(args.rounds):
        m = max(int(args.frac * args.num_users), 1)
        chosen = np.random.choice(args.num_users, m, replace=False)  # MISTAKE: order: drawn in front of the loops, so after a restart other clients are drawn and the interrupted loop does not come; draw from (seed, round) (or line with: for k in chosen:)
        states, weights = [], []
        for k in chosen:
            net = copy.deepcopy(net_glob)  # MISTAKE: unreg: a client's net is in no checkpoint, so after a restart it, and those of finished clients, are the global one; and replicas train nets of their own, without averaged gradients (or line with: states.append) (or line with: local_update(net, clients[k])
            local_update(net, clients[k], args.local_ep, args.lr, dev)
            states.append(net.state_dict())
            weights.append(len(parts[k]))
        net_glob.load_state_dict(average(states, weights))  # ARGUABLE: in front of the test loop, where states are given back, so it is done once; but of what states hold, see above
        accuracy = test(net_glob, test_loader, dev)
        if rank() == 0:
            writer.writerow([rnd, len(chosen), f"{accuracy:.4f}"])  # ARGUABLE: a row of the same file
            log.flush()
            print(f"Round {rnd:3d}, accuracy {accuracy:.2%}")
    if rank() == 0:
        torch.save(net_glob.state_dict(), "fedavg.pt")


if __name__ == "__main__":
    main()
