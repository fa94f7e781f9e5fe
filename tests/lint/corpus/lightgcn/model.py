"""LightGCN: embeddings that are spread over the graph."""
from typing import Tuple

import torch
import torch.nn as nn
import torch.nn.functional as F


class LightGCN(nn.Module):
    def __init__(self, num_users: int, num_items: int, graph: torch.Tensor, dim: int = 64, layers: int = 3):
        super().__init__()
        self.num_users, self.layers = int(num_users), layers
        self.embedding = nn.Embedding(int(num_users + num_items), dim)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.graph = graph

    def propagate(self) -> Tuple[torch.Tensor, torch.Tensor]:
        x = self.embedding.weight
        spread = [x]
        for _ in range(self.layers):
            x = torch.sparse.mm(self.graph, x)
            spread.append(x)
        mean = torch.stack(spread).mean(0)
        return mean[: self.num_users], mean[self.num_users :]

    def forward(self, users: torch.Tensor, positive: torch.Tensor, negative: torch.Tensor):
        u, i = self.propagate()
        margin = (u[users] * i[positive]).sum(1) - (u[users] * i[negative]).sum(1)
        first = self.embedding.weight
        size = sum(first[index].square().sum(1) for index in (users, positive + self.num_users, negative + self.num_users))
        return F.softplus(-margin).mean(), 0.5 * size.mean()

    @torch.no_grad()
    def scores(self, users: torch.Tensor) -> torch.Tensor:
        u, i = self.propagate()
        return u[users] @ i.T
