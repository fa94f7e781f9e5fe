import torch
import torch.nn as nn
import torch.nn.functional as F


class GCNLinkPredictor(nn.Module):
    """Learned node embeddings, GCN layers, and a Hadamard MLP decoder."""

    def __init__(self, num_nodes, hidden, num_layers, dropout):
        super().__init__()
        self.embedding = nn.Embedding(num_nodes, hidden)
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(num_layers))
        self.decoder = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden, 1))
        self.dropout = dropout
        nn.init.xavier_uniform_(self.embedding.weight)

    def encode(self, adj):
        h = self.embedding.weight
        for i, layer in enumerate(self.layers):
            h = torch.sparse.mm(adj, layer(h))
            if i + 1 < len(self.layers):
                h = F.dropout(F.relu(h), self.dropout, self.training)
        return h

    def decode(self, h, edges):
        return self.decoder(h[edges[..., 0]] * h[edges[..., 1]]).squeeze(-1)

    def forward(self, adj, positives, negatives):
        h = self.encode(adj)
        return self.decode(h, positives), self.decode(h, negatives)


def link_loss(positive, negative):
    return F.softplus(-positive).mean() + F.softplus(negative).mean()
