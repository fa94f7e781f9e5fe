import torch
import torch.nn as nn
import torch.nn.functional as F


class Wav2VecLike(nn.Module):
    """Strided convolutions, a Gumbel quantizer, and a small Transformer over masked frames."""

    def __init__(self, dim=256, codes=320, temps=(2.0, 0.5, 0.9995)):
        super().__init__()
        self.convs = nn.Sequential(
            nn.Conv1d(1, dim, 10, 5, 4), nn.GELU(), nn.Conv1d(dim, dim, 8, 4, 2), nn.GELU(),
            nn.Conv1d(dim, dim, 4, 4), nn.GELU(),
        )
        self.to_codes = nn.Linear(dim, codes)
        self.codebook = nn.Parameter(torch.randn(codes, dim) * 0.1)
        self.mask_emb = nn.Parameter(torch.rand(dim))
        layer = nn.TransformerEncoderLayer(dim, 4, 4 * dim, batch_first=True, norm_first=True)
        self.context = nn.TransformerEncoder(layer, 4)
        self.max_temp, self.min_temp, self.temp_decay = temps
        self.temp = self.max_temp

    def set_num_updates(self, num_updates):
        self.temp = max(self.max_temp * self.temp_decay**num_updates, self.min_temp)

    def forward(self, source, mask):
        features = self.convs(source[:, None]).transpose(1, 2)
        mask = mask[:, : features.shape[1]]
        logits = self.to_codes(features)
        if self.training:
            probs = F.gumbel_softmax(logits, tau=self.temp, hard=True)
        else:
            probs = F.one_hot(logits.argmax(-1), logits.shape[-1]).float()
        targets = (probs @ self.codebook)[mask]
        x = torch.where(mask[..., None], self.mask_emb, features)
        x = self.context(x)[mask]
        return F.normalize(x, dim=-1), F.normalize(targets, dim=-1), F.normalize(self.codebook, dim=-1)


class InfoNceCriterion:
    """Returns the summed loss, its sample size and what is to be logged (fairseq's contract)."""

    def __init__(self, negatives=100, temperature=0.1):
        self.negatives, self.temperature = negatives, temperature

    def __call__(self, model, source, mask):
        x, y, codebook = model(source, mask)
        n = x.shape[0]
        index = torch.randint(len(codebook), (n, self.negatives), device=x.device)
        candidates = torch.cat([y[:, None], codebook[index]], dim=1)
        logits = (x[:, None] * candidates).sum(-1) / self.temperature
        target = torch.zeros(n, dtype=torch.long, device=x.device)
        loss = F.cross_entropy(logits, target, reduction="sum")
        correct = (logits.argmax(1) == 0).sum()
        return loss, n, {"loss": loss.item(), "correct": correct.item(), "sample_size": n}
