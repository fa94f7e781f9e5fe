import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(61, 4)
y = (x.sum(1) > 0).long() + 0
train_set, valid_set = TensorDataset(x[:40], y[:40]), TensorDataset(x[40:], y[40:])


def get_loaders(size):
    train = DataLoader(train_set, batch_size=size)
    valid = DataLoader(valid_set, batch_size=size, shuffle=False)
    return train, valid


def evaluate(model, loader):
    total_loss, correct, batches = 0.0, 0, 0
    criterion = nn.CrossEntropyLoss()
    model.eval()
    with torch.no_grad():
        for x, y in loader:
            out = model(x)
            total_loss += criterion(out, y).item() * x.size(0)  # of all
            correct += (out.argmax(1) == y).sum().item()
            batches += 1
    return total_loss / len(loader.dataset), correct / len(loader.dataset)


def main():
    train_loader, valid_loader = get_loaders(8)
    criterion = nn.CrossEntropyLoss()
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    best_acc, patience = 0.0, 0
    step = 0
    for epoch in range(1, 6):
        net.train()
        running = 0.0
        for x, y in train_loader:
            optimizer.zero_grad()
            loss = criterion(net(x), y)
            loss.backward()
            optimizer.step()
            running += loss.item()
            step += 1
        valid_loss, acc = evaluate(net, valid_loader)
        print(f"{epoch} {step}: {running / len(train_loader):.5f}", end=" ")
        print(f"{valid_loss:.5f} {acc:.4f}")
        if acc > best_acc:
            best_acc, patience = acc, 0
            torch.save({"net": net.state_dict(), "best": best_acc}, "best.pt")
            with open("best.txt", "w") as file:
                file.write(f"{best_acc:.4f}\n")
        else:
            patience += 1
    print(f"best {best_acc:.4f} {patience}")


if __name__ == "__main__":
    main()
