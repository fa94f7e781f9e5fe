"""What is said about ER201 to ER211."""

from __future__ import annotations

from elasticrun.lint.rules.rule import Rule

_LOOP = "for epoch in remaining_epochs_until(30):\n"
_TRAIN = "    for x, y in train:\n        step(x, y)\n"
_VALID = "    for x, y in valid:\n        evaluate(x, y)\n"

LOOP_RULES = (
    Rule(
        "ER201",
        "E",
        "epoch loops nested",
        "use a plain range() for one of them, or put one behind the other",
        "Epochs of a job are numbered one after another, so `remaining_epochs_until` "
        "inside of another one raises LoopOrderError.",
        _LOOP + "    for inner in remaining_epochs_until(2):\n        work(inner)\n",
        _LOOP + "    for inner in range(2):\n        work(inner)\n" + _TRAIN,
    ),
    Rule(
        "ER202",
        "H",
        "loader iterated outside an epoch, its result in plain variables",
        "keep the sum in Variables",
        "The loop is resumed in its middle, but a plain sum begins at its first value.",
        "total = 0.0\nfor x, y in valid:\n    total += loss(x, y)\nprint(total)\n",
        "sums = Variables(total=0.0)\nfor x, y in valid:\n"
        "    sums.total += loss(x, y)\nprint(sums.total)\n",
    ),
    Rule(
        "ER203",
        "E",
        "zip of elastic loaders",
        "make one loader over torch.utils.data.StackDataset(a, b), or loop over them "
        "in turn",
        "A job has one position, so it cannot resume two loops at once.",
        _LOOP + "    for a, b in zip(train, valid):\n        step(a, b)\n",
        _LOOP + _TRAIN + _VALID,
    ),
    Rule(
        "ER204",
        "E",
        "loops over elastic loaders nested, or next(iter(loader))",
        "leave the first loop before the second begins; take a sample from the data "
        "set",
        "A loop inside a loop raises LoopOrderError. What `next(iter())` reads counts "
        "as a loop: it is skipped after a restart, where `next` then has nothing and "
        "raises StopIteration.",
        _LOOP
        + "    for x, y in train:\n"
        + "        for a, b in valid:\n            evaluate(a, b)\n",
        _LOOP + _TRAIN + _VALID,
    ),
    Rule(
        "ER205",
        "E",
        "loader created inside a dataset loop",
        "create all loaders before the first loop",
        "Loaders are known by the order of their creation, and the interrupted loop "
        "does "
        "not run its earlier batches again.",
        _LOOP
        + "    for x, y in train:\n"
        + "        extra = AdaptiveDataLoader(x, batch_size=4)\n",
        "extra = AdaptiveDataLoader(extra_set, batch_size=4)\n" + _LOOP + _TRAIN,
    ),
    Rule(
        "ER206",
        "E",
        "epoch bound is a total, and already reached",
        "give the number of epochs that the whole job has finished after this loop",
        "`remaining_epochs_until(n)` ends when the job has finished n epochs, those of "
        "earlier epoch loops included.",
        _LOOP + _TRAIN + _LOOP + _VALID,
        _LOOP + _TRAIN + "for epoch in remaining_epochs_until(60):\n" + _VALID,
    ),
    Rule(
        "ER207",
        "W",
        "iterator of a loader held open",
        "loop over the loader with `for`",
        "A loop is finished when its `for` is left. An iterator that is kept says "
        "neither where the job is nor when the loop is done.",
        _LOOP
        + "    batches = iter(train)\n"
        + "    for number in range(10):\n        step(*next(batches))\n",
        _LOOP + "    for x, y in train:\n        step(x, y)\n"
        "        if train.batch_index == 9:\n            break\n",
    ),
    Rule(
        "ER208",
        "E",
        "whether a loop runs depends on rank, random numbers or time",
        "let the epoch's number or a saved value decide, or use request_stop()",
        "All replicas must come to the same loops in the same order, and again so "
        "after "
        "a restart.",
        "import random\n\n"
        + _LOOP
        + _TRAIN
        + "    if random.random() < 0.5:\n"
        + "        for x, y in valid:\n            evaluate(x, y)\n",
        _LOOP
        + _TRAIN
        + "    if epoch % 2:\n"
        + "        for x, y in valid:\n            evaluate(x, y)\n",
    ),
    Rule(
        "ER209",
        "W",
        "break of the epoch loop that is not remembered",
        "keep what decides in Variables",
        "What decides to stop is a plain value, and a restart gives it its first value "
        "again. The job then trains on where it would have stopped.",
        "bad = 0\n" + _LOOP + _TRAIN + "    bad = bad + 1 if worse() else 0\n"
        "    if bad > 3:\n        break\n",
        "stop = Variables(bad=0)\n" + _LOOP + _TRAIN + "    if worse():\n"
        "        stop.bad += 1\n    if stop.bad > 3:\n        break\n",
    ),
    Rule(
        "ER210",
        "E",
        "handler swallows the stop",
        "catch Exception, or raise again",
        "A stop leaves the script as JobStopped, a SystemExit. A bare `except:` or "
        "`except BaseException` around a loop catches it, and the program goes on "
        "behind it, until its next loop or epoch stops it again.",
        _LOOP
        + "    try:\n        for x, y in train:\n            step(x, y)\n"
        + "    except:\n        print('failed')\n",
        _LOOP
        + "    try:\n        for x, y in train:\n            step(x, y)\n"
        + "    except RuntimeError:\n        print('failed')\n        raise\n",
    ),
    Rule(
        "ER211",
        "W",
        "plain DataLoader beside elastic ones in an epoch",
        "make it an AdaptiveDataLoader",
        "Its loop is no part of the position: it runs from its start after a restart, "
        "and each replica sees all of it.",
        "from torch.utils.data import DataLoader\n\n"
        "test = DataLoader(test_set, batch_size=64)\n"
        + _LOOP
        + _TRAIN
        + "    for x, y in test:\n        evaluate(x, y)\n",
        _LOOP + _TRAIN + _VALID,
    ),
)
