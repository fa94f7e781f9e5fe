"""Small: no functions, one loop; the simplest of scripts, with a data set by numpy."""
import numpy as np
import torch

import elasticrun

rng = np.random.RandomState(0)
X = rng.uniform(-1, 1, size=(5000, 3)).astype("float32")
Y = (X @ np.array([[1.0], [2.0], [-3.0]], dtype="float32") + 0.1 * rng.randn(5000, 1)).astype("float32")
data = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
n = int(0.8 * len(data))
train, test = torch.utils.data.Subset(data, range(n)), torch.utils.data.Subset(data, range(n, len(data)))

torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.01)
ddp = elasticrun.AdaptiveDataParallel(model, opt)
loader = elasticrun.AdaptiveDataLoader(train, batch_size=50, shuffle=True)
for epoch in elasticrun.remaining_epochs_until(20):
    for xb, yb in loader:
        opt.zero_grad()
        ((ddp(xb) - yb) ** 2).mean().backward()
        opt.step()
    if epoch == 9:
        for g in opt.param_groups:
            g["lr"] = 0.001
with torch.no_grad():
    xs, ys = zip(*[test[i] for i in range(len(test))])
    mse = ((model(torch.stack(xs)) - torch.stack(ys)) ** 2).mean().item()
if elasticrun.rank() == 0:
    print("test mse", mse, "weights", model.weight.tolist())
    with open("result.txt", "w") as f:
        f.write(f"{mse}\n")
