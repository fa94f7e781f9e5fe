"""What is said about ER101 to ER112."""

from __future__ import annotations

from elasticrun.lint.rules.rule import Rule

_LOOP = "for epoch in remaining_epochs_until(30):\n"
_TRAIN = "    for x, y in train:\n        step(x, y)\n"
_VALID = "    for x, y in valid:\n        evaluate(x, y)\n"

REPLAY_RULES = (
    Rule(
        "ER101",
        "E",
        "LR scheduler stepped in replayed code",
        "move it after the last dataset loop of the epoch",
        "The scheduler is saved with the number of its steps. Code in front of a loop "
        "runs again when the job stops in that loop, so the schedule is one step ahead "
        "after each such restart. `step(epoch)` sets instead of adding, and is fine.",
        _LOOP + _TRAIN + "    scheduler.step()\n" + _VALID,
        _LOOP + _TRAIN + _VALID + "    scheduler.step()\n",
    ),
    Rule(
        "ER102",
        "E",
        "counter updated from its own value in replayed code",
        "move it into a loop's body or after the last dataset loop of the epoch",
        "What is in Variables or a State comes back with the value that it had when "
        "the "
        "job stopped. Adding to it in replayed code adds once more for each restart.",
        "seen = Variables(epochs=0)\n" + _LOOP + "    seen.epochs += 1\n" + _TRAIN,
        "seen = Variables(epochs=0)\n" + _LOOP + _TRAIN + "    seen.epochs += 1\n",
    ),
    Rule(
        "ER103",
        "E",
        "saved container grows in replayed code",
        "append after the last dataset loop of the epoch",
        "A list in Variables comes back with all that was appended before the job "
        "stopped. Appending in replayed code appends the same once more.",
        "log = Variables(losses=[])\n"
        + _LOOP
        + _TRAIN
        + "    log.losses.append(epoch)\n"
        + _VALID,
        "log = Variables(losses=[])\n"
        + _LOOP
        + _TRAIN
        + _VALID
        + "    log.losses.append(epoch)\n",
    ),
    Rule(
        "ER104",
        "E",
        "file appended in replayed code",
        "write after the last dataset loop of the epoch, or guard it with once(key)",
        "A file outlives the process. Lines appended in replayed code appear once more "
        "for each restart.",
        _LOOP
        + _TRAIN
        + '    with open("log.csv", "a") as file:\n        file.write(f"{epoch}\\n")\n'
        + _VALID,
        _LOOP
        + _TRAIN
        + _VALID
        + '    with open("log.csv", "a") as file:\n        file.write(f"{epoch}\\n")\n',
    ),
    Rule(
        "ER105",
        "W",
        "file emptied at every restart",
        'open it with mode "a"',
        "Mode `w` empties the file. The script runs again from its top after a "
        "restart, "
        "so all lines that were written before are lost.",
        'log = open("log.csv", "w")\n'
        + _LOOP
        + _TRAIN
        + '    log.write(f"{epoch}\\n")\n',
        'log = open("log.csv", "a")\n'
        + _LOOP
        + _TRAIN
        + '    log.write(f"{epoch}\\n")\n',
    ),
    Rule(
        "ER106",
        "W",
        "rename, removal or creation that cannot be repeated",
        "ask whether it is still to do (missing_ok, exist_ok, os.path.exists), or move "
        "it after the last dataset loop",
        "What was moved, removed or made before the restart is not there to be moved "
        "again, and the replayed line raises.",
        'import shutil\n\nshutil.move("new", "old")\n' + _LOOP + _TRAIN,
        'import os\nimport shutil\n\nif os.path.exists("new"):\n'
        '    shutil.move("new", "old")\n' + _LOOP + _TRAIN,
    ),
    Rule(
        "ER107",
        "E",
        "weights, averaged weights or optimizer stepped in replayed code",
        "move it into a loop's body or after the last dataset loop of the epoch",
        "Weights are saved as they were when the job stopped. A step in replayed "
        "code is "
        "made once more for each restart.",
        "ema = torch.optim.swa_utils.AveragedModel(net)\nregister(ema=ema)\n"
        + _LOOP
        + _TRAIN
        + "    ema.update_parameters(net)\n"
        + _VALID,
        "ema = torch.optim.swa_utils.AveragedModel(net)\nregister(ema=ema)\n"
        + _LOOP
        + _TRAIN
        + _VALID
        + "    ema.update_parameters(net)\n",
    ),
    Rule(
        "ER108",
        "E",
        "saved value multiplied or added in replayed code",
        "compute it from the epoch's number, or move it after the last dataset loop",
        "The learning rate is saved with the optimizer. Multiplying it in replayed "
        "code "
        "multiplies once more for each restart.",
        _LOOP
        + "    if epoch in (10, 20):\n"
        + "        for group in optimizer.param_groups:\n"
        + '            group["lr"] *= 0.1\n'
        + _TRAIN,
        _LOOP
        + "    for group in optimizer.param_groups:\n"
        + '        group["lr"] = 0.1 * 0.1 ** (epoch // 10)\n'
        + _TRAIN,
    ),
    Rule(
        "ER109",
        "W",
        "random draw not keyed by seed and epoch in replayed code",
        "draw from a generator seeded with (seed, epoch), or inside a loop",
        "The generators come back when the interrupted loop continues, not in the code "
        "in front of it. A draw there gives another value when it is replayed.",
        _LOOP + "    size = torch.randint(128, 256, ())\n" + _TRAIN,
        _LOOP
        + "    generator = torch.Generator().manual_seed(epoch)\n"
        + "    size = torch.randint(128, 256, (), generator=generator)\n"
        + _TRAIN,
    ),
    Rule(
        "ER110",
        "W",
        "external effect sent again",
        "send it after the last dataset loop, guard it with once(key), or give the run "
        "an id to continue",
        "A request, a row in a data base or a tracker's run outlives the process. "
        "Replayed code sends it once more for each restart.",
        'import requests\n\nurl = "https://example.org/hook"\n'
        + _LOOP
        + _TRAIN
        + '    requests.post(url, json={"epoch": epoch})\n'
        + _VALID,
        'import requests\n\nurl = "https://example.org/hook"\n'
        + _LOOP
        + _TRAIN
        + _VALID
        + '    requests.post(url, json={"epoch": epoch})\n',
    ),
    Rule(
        "ER111",
        "H",
        "logged again in replayed code",
        "log after the last dataset loop of the epoch",
        "A line printed in replayed code appears once more for each restart.",
        _LOOP + "    print(epoch)\n" + _TRAIN,
        _LOOP + _TRAIN + "    print(epoch)\n",
    ),
    Rule(
        "ER112",
        "H",
        "live weights saved in replayed code",
        "save after the last dataset loop of the epoch",
        "After a restart the weights are those of the place where the job stopped, so "
        "the replayed line writes later weights under the earlier name.",
        _LOOP + '    torch.save(net.state_dict(), f"before-{epoch}.pt")\n' + _TRAIN,
        _LOOP + _TRAIN + '    torch.save(net.state_dict(), f"after-{epoch}.pt")\n',
    ),
)
