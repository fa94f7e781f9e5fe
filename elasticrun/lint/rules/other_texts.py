"""What is said about ER001, ER002, ER401 to ER403 and ER501 to ER504."""

from __future__ import annotations

from elasticrun.lint.rules.rule import Rule

_LOOP = "for epoch in remaining_epochs_until(30):\n"
_TRAIN = "    for x, y in train:\n        step(x, y)\n"
_VALID = "    for x, y in valid:\n        evaluate(x, y)\n"

OTHER_RULES = (
    Rule(
        "ER001",
        "W",
        "unused suppression",
        "remove the comment",
        "Nothing is found on the line, so the comment would hide what comes later.",
        _LOOP + _TRAIN + "    scheduler.step()  # elasticrun: ignore[ER101] meant\n",
        _LOOP
        + _TRAIN
        + "    scheduler.step()  # elasticrun: ignore[ER101] twice is meant\n"
        + _VALID,
    ),
    Rule(
        "ER002",
        "W",
        "looks elastic, but the epoch loop is range()",
        "write `for epoch in remaining_epochs_until(n):`",
        "range() begins at 0 after every restart, and the loader's position does not "
        "fit. Only `remaining_epochs_until` skips the epochs that were finished.",
        "for epoch in range(30):\n" + _TRAIN,
        _LOOP + _TRAIN,
    ),
    Rule(
        "ER401",
        "E",
        "collective, checkpoint or loop under an unbalanced rank test",
        "let all replicas come to it, and test the rank only around what one does "
        "alone",
        "The replicas that skip it do not take part, and the others wait for them.",
        _LOOP + _TRAIN + "    if elasticrun.rank() == 0:\n        dist.barrier()\n",
        _LOOP + _TRAIN + "    dist.barrier()\n    if elasticrun.rank() == 0:\n"
        "        print(epoch)\n",
    ),
    Rule(
        "ER402",
        "E",
        "State or loader created conditionally",
        "create it before the first loop, in every start and on every replica",
        "States and loaders must be made in the same order in every start, on every "
        "replica. What depends on rank, restart, time or epoch is not.",
        "if elasticrun.generation() == 0:\n    extra = Variables(name='extra', n=0)\n"
        + _LOOP
        + _TRAIN,
        "extra = Variables(name='extra', n=0)\n" + _LOOP + _TRAIN,
    ),
    Rule(
        "ER403",
        "H",
        "all replicas write one path",
        "write it on rank 0 only, or put the rank into the name",
        "Every replica runs the script, so several write the file at the same time.",
        _LOOP + _TRAIN + "    torch.save(net.state_dict(), 'net.pt')\n",
        _LOOP
        + _TRAIN
        + "    if elasticrun.rank() == 0:\n"
        + "        torch.save(net.state_dict(), 'net.pt')\n",
    ),
    Rule(
        "ER501",
        "W",
        "unseeded data",
        "seed it: torch.manual_seed(0) at the top, or a seeded generator=",
        "A split or order that is drawn without a seed is another one after every "
        "restart: samples of the validation set were trained on.",
        "from torch.utils.data import random_split\n\n"
        "parts = random_split(all_data, [800, 200])\n" + _LOOP + _TRAIN,
        "from torch.utils.data import random_split\n\n"
        "parts = random_split(\n"
        "    all_data, [800, 200], generator=torch.Generator().manual_seed(0)\n)\n"
        + _LOOP
        + _TRAIN,
    ),
    Rule(
        "ER502",
        "E",
        "seed from the time or the process",
        "use a constant seed",
        "The seed differs with every start, and so does all that is drawn from it.",
        "import time\n\ntorch.manual_seed(int(time.time()))\n" + _LOOP + _TRAIN,
        "torch.manual_seed(0)\n" + _LOOP + _TRAIN,
    ),
    Rule(
        "ER503",
        "W",
        "batch size, learning rate or steps from the world size",
        "give the global batch size, and what belongs to it",
        "The batch size of an elastic loader is that of all replicas together, so a "
        "restart at another number of replicas changes nothing. A value made from the "
        "world size does.",
        "more = AdaptiveDataLoader(more_set, batch_size=32 * elasticrun.world_size())\n"
        + _LOOP
        + _TRAIN,
        "more = AdaptiveDataLoader(more_set, batch_size=128)\n" + _LOOP + _TRAIN,
    ),
    Rule(
        "ER504",
        "E",
        "sampler that can only be iterated",
        "give sampler= a list of indices, or something with a length and __getitem__",
        "A loop continues in its middle, so the order must be readable at a position.",
        "from torch.utils.data import WeightedRandomSampler\n\n"
        "more = AdaptiveDataLoader(\n"
        "    more_set, batch_size=64, sampler=WeightedRandomSampler(weights, 100)\n)\n"
        + _LOOP
        + _TRAIN,
        "generator = torch.Generator().manual_seed(0)\n"
        "order = torch.multinomial(weights, 100, generator=generator)\n"
        "more = AdaptiveDataLoader(more_set, batch_size=64, sampler=order)\n"
        + _LOOP
        + _TRAIN,
    ),
)
