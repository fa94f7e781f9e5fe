"""What is said about ER301 to ER307."""

from __future__ import annotations

from elasticrun.lint.rules.rule import Rule

_LOOP = "for epoch in remaining_epochs_until(30):\n"
_TRAIN = "    for x, y in train:\n        step(x, y)\n"
_VALID = "    for x, y in valid:\n        evaluate(x, y)\n"

VALUE_RULES = (
    Rule(
        "ER301",
        "W",
        "value lost at a restart",
        "keep it in Variables (or in a State)",
        "Plain Python values are made again by the replayed code, and what later code "
        "has set is gone. It is an error where the value decides something, is saved, "
        "or goes to the optimizer.",
        "best = 0.0\n" + _LOOP + _TRAIN + "    accuracy = evaluate()\n"
        "    if accuracy > best:\n        best = accuracy\n"
        '        torch.save(net, "best.pt")\n',
        "best = Variables(accuracy=0.0)\n"
        + _LOOP
        + _TRAIN
        + "    accuracy = evaluate()\n"
        "    if accuracy > best.accuracy:\n        best.accuracy = accuracy\n"
        '        torch.save(net, "best.pt")\n',
    ),
    Rule(
        "ER302",
        "W",
        "sum over a loop covers only a part",
        "keep the sum in Variables, reduced over the replicas in the loop's body, and "
        "set it back after it was read",
        "A plain sum has only the samples of this replica, and only those since the "
        "last "
        "restart. It is a hint where the sum is only printed.",
        "best = Variables(loss=9e9)\n" + _LOOP + _TRAIN + "    total = 0.0\n"
        "    for x, y in valid:\n        total += loss(x, y).item()\n"
        "    best.loss = min(best.loss, total)\n",
        "best = Variables(loss=9e9, total=0.0)\n"
        + _LOOP
        + _TRAIN
        + "    for x, y in valid:\n        best.total += loss(x, y).item()\n"
        "    best.loss = min(best.loss, best.total)\n    best.total = 0.0\n",
    ),
    Rule(
        "ER303",
        "E",
        "field of a State missing in save or load",
        "write and read the same fields",
        "What save does not write, or load does not set, has its first value after a "
        "restart.",
        "class Tokens(State):\n"
        "    def __init__(self):\n        super().__init__('tokens')\n"
        "        self.seen = 0\n        self.kept = 0\n\n"
        "    def save(self, fileobj):\n"
        "        fileobj.write(f'{self.seen} {self.kept}'.encode())\n\n"
        "    def load(self, fileobj):\n"
        "        self.seen = int(fileobj.read().split()[0])\n",
        "class Tokens(State):\n"
        "    def __init__(self):\n        super().__init__('tokens')\n"
        "        self.seen = 0\n        self.kept = 0\n\n"
        "    def save(self, fileobj):\n"
        "        fileobj.write(f'{self.seen} {self.kept}'.encode())\n\n"
        "    def load(self, fileobj):\n"
        "        self.seen, self.kept = map(int, fileobj.read().split())\n",
    ),
    Rule(
        "ER304",
        "W",
        "index of enumerate used as a step",
        "use loader.enumerate() or loader.batch_index",
        "The interrupted loop continues in its middle, and enumerate counts from 0.",
        _LOOP
        + "    for step, (x, y) in enumerate(train):\n"
        + "        writer.add_scalar('loss', loss(x, y), step)\n",
        _LOOP
        + "    for step, (x, y) in train.enumerate():\n"
        + "        writer.add_scalar('loss', loss(x, y), step)\n",
    ),
    Rule(
        "ER305",
        "W",
        "gradient accumulation by hand",
        "give the loader the batch size of a whole step, and max_local_batch_size=",
        "A job may stop between two batches. Gradients that wait for the next step are "
        "not saved.",
        _LOOP
        + "    for number, (x, y) in train.enumerate():\n"
        + "        loss(x, y).backward()\n"
        + "        if (number + 1) % 4 == 0:\n"
        + "            optimizer.step()\n            optimizer.zero_grad()\n",
        "small = AdaptiveDataLoader(train_set, batch_size=256, "
        "max_local_batch_size=64)\n"
        + _LOOP
        + "    for x, y in small:\n"
        + "        loss(x, y).backward()\n"
        + "        optimizer.step()\n        optimizer.zero_grad()\n",
    ),
    Rule(
        "ER306",
        "W",
        "trained object in no state",
        "give it to AdaptiveDataParallel(model, optimizer, scheduler) or register(...)",
        "What is not registered begins anew after a restart.",
        "scaler = torch.amp.GradScaler()\n"
        + _LOOP
        + "    for x, y in train:\n"
        + "        scaler.scale(loss(x, y)).backward()\n"
        + "        scaler.step(optimizer)\n        scaler.update()\n",
        "scaler = torch.amp.GradScaler()\nregister(scaler=scaler)\n"
        + _LOOP
        + "    for x, y in train:\n"
        + "        scaler.scale(loss(x, y)).backward()\n"
        + "        scaler.step(optimizer)\n        scaler.update()\n",
    ),
    Rule(
        "ER307",
        "W",
        "loop variable read after the loop",
        "keep it in Variables, or read it in the loop's body",
        "A loop that was finished before the restart yields nothing, so its variables "
        "are not set.",
        _LOOP
        + "    for x, y in train:\n        error = loss(x, y)\n"
        + "    print(error.item())\n",
        "last = Variables(error=0.0)\n"
        + _LOOP
        + "    for x, y in train:\n        last.error = loss(x, y).item()\n"
        + "    print(last.error)\n",
    ),
)
