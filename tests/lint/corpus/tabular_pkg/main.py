"""Classification of a table with embeddings of nothing: a plain net; ported."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from settings import Settings
from table import read

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, Variables, rank, remaining_epochs_until


def main():
    settings = Settings.from_command_line()
    torch.manual_seed(settings.seed)
    train_set, valid_set = read(settings)
    train = AdaptiveDataLoader(train_set, batch_size=settings.batch, shuffle=True)
    valid = AdaptiveDataLoader(valid_set, batch_size=1024, even_batches=False)
    width = train_set.tensors[0].shape[1]
    net = nn.Sequential(nn.Linear(width, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 1), nn.Flatten(0))
    optimizer = torch.optim.AdamW(net.parameters(), settings.lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda e: 0.95**e)
    model = AdaptiveDataParallel(net, optimizer, scheduler)
    best = Variables(accuracy=0.0, weights={})
    for epoch in remaining_epochs_until(settings.epochs):
        model.train()
        seen = set()
        for x, y in train:
            if train.is_first and train.batch_index == 0 and epoch > 20 and best.accuracy < 0.5:
                break
            loss = F.binary_cross_entropy_with_logits(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.add(train.local_batch_size)  # ARGUABLE: carried from batch to batch, but printed only
            if len(seen) > 3 and rank() == 1:
                print("many sizes:", sorted(seen))
                seen.clear()
        net.eval()
        total = Accumulator()
        with torch.no_grad():
            for x, y in valid:
                total["hits"] += ((net(x) > 0) == y.bool()).sum()
                total["n"] += len(y)
        with total.synchronized():
            accuracy = total["hits"] / total["n"]
        scheduler.step()
        if accuracy > best.accuracy:
            best.accuracy = accuracy
            best.weights = {k: v.clone() for k, v in net.state_dict().items()}
        if rank() == 0:
            print(f"epoch {epoch}: {accuracy:.4f}")
    if rank() == 0:
        torch.save(best.weights, "adult.pt")


if __name__ == "__main__":
    main()
