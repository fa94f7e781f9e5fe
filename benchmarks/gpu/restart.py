"""Measure restarts of two processes that have contexts on one GPU; JSON lines.

    python benchmarks/gpu/restart.py [--rounds 2]

`scale` to one process and back, and `kill -9` of a replica, with gloo; and `kill -9`
with `rescue="always"` and NCCL, where that lets two processes share a GPU. As
benchmarks/rescale.py, whose script trains on a CPU.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
import rescale

# One GPU for all, where `device()` would refuse that two share it.
TRAIN = """
import sys, torch, elasticrun as er
device = "cuda:0" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
if device == "cuda:0":
    from elasticrun.replicas import devices
    devices.why_not_a_gpu_each = lambda seen: ""
er.init(backend={backend!r})
net = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.GELU(),
                          torch.nn.Linear(1024, 10)).to(device)
optimizer = torch.optim.AdamW(net.parameters())
model = er.AdaptiveDataParallel(net, optimizer)
data = torch.utils.data.TensorDataset(torch.randn(4096, 1024))
loader = er.AdaptiveDataLoader(data, 64, shuffle=True)
for epoch in er.remaining_epochs_until(int(sys.argv[-1])):
    for (rows,) in loader:
        optimizer.zero_grad()
        model(rows.to(device)).square().mean().backward()
        optimizer.step()
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--small", action="store_true", help="one round")
    given = parser.parse_args()
    rounds = 1 if given.small else given.rounds
    run = [*rescale.ELASTICRUN, "run", "--replicas", "2"]
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    for rescue, backend in (("off", "gloo"), ("always", "auto")):
        script = TRAIN.format(backend=backend)
        with rescale.job_of(run, 0, rescue, train=script) as (job, process):
            scaled = []
            for number in range(2 * rounds * (rescue == "off")):
                job.wait_until_steady()
                request = ("scale", ("1", "2")[number % 2], "--force")
                scaled.append(job.restart(functools.partial(job.ask, *request)))
            if scaled:
                rescale.tell("scale on a GPU", "elasticrun", scaled, 0)
            killed = [rescale.kill_with_spares(job, process) for _ in range(rounds)]
            what = "kill -9 on a GPU" + ", rescued" * (rescue == "always")
            rescale.tell(what, "elasticrun", killed, 0)


if __name__ == "__main__":
    main()
