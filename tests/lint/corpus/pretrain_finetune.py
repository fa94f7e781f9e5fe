"""Two phases: an auto-encoder first, then a classifier with its encoder."""
import torch
import torch.nn as nn
import torch.nn.functional as F
import torchvision
from torchvision.transforms import ToTensor

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, Variables, device, rank, remaining_epochs_until

PRE, FINE = 10, 20
torch.manual_seed(0)
dev = device()
train = AdaptiveDataLoader(torchvision.datasets.MNIST("data", transform=ToTensor()), batch_size=128, shuffle=True)
test = AdaptiveDataLoader(torchvision.datasets.MNIST("data", train=False, transform=ToTensor()), batch_size=500)
encoder = nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 64)).to(dev)
decoder = nn.Sequential(nn.ReLU(), nn.Linear(64, 784)).to(dev)
auto = nn.Sequential(encoder, decoder)
opt_auto = torch.optim.Adam(auto.parameters(), 1e-3)
auto_model = AdaptiveDataParallel(auto, opt_auto, name="auto")
classifier = nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10)).to(dev)
opt_class = torch.optim.Adam(classifier.parameters(), 1e-3)
sched = torch.optim.lr_scheduler.LambdaLR(opt_class, lambda e: min(1.0, (e + 1) / 5))
class_model = AdaptiveDataParallel(classifier, opt_class, sched, name="classifier")
info = Variables(starts=0, best=0.0)
info.starts += 1  # MISTAKE: zoneP: counted up again by each start, in front of the first loop (which may be meant, but is no longer the same as in one run)
sched.step()  # MISTAKE: zoneP: the registered scheduler takes one more step with each start

for epoch in remaining_epochs_until(PRE):
    for x, _ in train:
        x = x.to(dev)
        loss = F.mse_loss(auto_model(x), x.flatten(1))
        opt_auto.zero_grad()
        loss.backward()
        opt_auto.step()
    if rank() == 0:
        print("pretraining", epoch)

for target, source in zip(classifier[:4].parameters(), encoder.parameters()):
    target.data.copy_(source.data)  # MISTAKE: zoneP: between the phases; a restart in the second phase puts the encoder's weights over the fine-tuned ones, and what goes through .data is not undone; once("copied")
if rank() == 0:
    with open("phases.log", "a") as f:
        f.write("pretraining is done\n")  # MISTAKE: effect: behind the first epoch loop, so repeated by each restart in the second phase (or line with: with open("phases.log", "a"))

for epoch in remaining_epochs_until(PRE + FINE):
    class_model.train()
    for x, y in train:
        loss = F.cross_entropy(class_model(x.to(dev)), y.to(dev))
        opt_class.zero_grad()
        loss.backward()
        opt_class.step()
    total = Accumulator()
    with torch.no_grad():
        for x, y in test:
            total["hits"] += (classifier(x.to(dev)).argmax(1) == y.to(dev))[: test.num_valid].sum()
    with total.synchronized():
        info.best = max(info.best, total["hits"] / test.num_samples)
    sched.step()
    if rank() == 0:
        print("fine-tuning", epoch, info.best)
