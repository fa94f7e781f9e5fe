"""Precision and recall on the corpus of labelled scripts."""

from __future__ import annotations

import runpy

import pytest

from tests.docs.documents import ROOT
from tests.lint.labelled import PROGRAMS, Measured, measure

# What the script itself is told as soon as it runs, or runs again.
TOLD = {
    # StateNameError names both states where the second one is made.
    ("active_learning.py", 67): "model = AdaptiveDataParallel(net, optimizer)",
    ("wgan.py", 81): "D = AdaptiveDataParallel(netD, optD)",
    # LoopOrderError names both iterators, and CombinedLoader.
    ("cycle_loader.py", 36): "x, y = next(batches)",
    ("cyclegan.py", 78): "for (a, _), (b, _) in zip(loader_a, loader_b):",
    ("monodepth/trainer.py", 27): "self.val_iter = iter(self.val_loader)",
    ("multitask_text.py", 85): "iterators = {t: endless(train[t]) for t in TASKS}",
    # TypeError names the sampler where the loader is made.
    ("manual_split.py", 24): "sampler = DistributedSampler(...)",
    # FileExistsError names the folder.
    ("speech_ctc.py", 72): "os.mkdir(args.out)",
}
MISSED = {
    # No rule looks for files that are renamed again.
    ("rotating_ckpt.py", 27): 'newer.replace(self.folder / f"last.{k}.pt")',
    # ER302 names the call that feeds the counts, in the other file (main.py).
    ("ner/metrics.py", 27): 'self.counts["tp"] += len(a & b)',
    # No rule knows what gives parameters other names.
    ("pruning.py", 92): "prune.global_unstructured(...)",
    # In general an Accumulator's sum comes back; here it was emptied before.
    ("active_learning.py", 78): "curve.append(...)",
    # No rule knows that rounds around epoch loops do not train again.
    ("active_learning.py", 64): "for rnd in range(args.rounds):",
    ("active_learning.py", 87): "labeled += [...]",
    # No rule knows that what is seeded in front of a loop is not at its place in it.
    ("own_rng.py", 60): "mask = torch.rand(x.shape, generator=check) < args.ratio",
    # No rule asks whether all starts come to what is made under `once`.
    ("timm_cut.py", 153): 'if once("tensorboard") and rank() == 0:',
    # No rule knows that time decides the learning rate.
    ("time_limit.py", 32): 'group["lr"] = 0.1 * max(0.0, 1 - elapsed / args.hours)',
    # No rule knows in which order a folder is listed.
    ("graph_batches.py", 16): "for path in glob.glob(pattern):",
    ("timm_like/data.py", 14): "self.classes = [d for d in os.listdir(root) ...]",
    ("wav2vec_pre/dataset.py", 12): "paths += [os.path.join(folder, f) for f in ...]",
    # No rule looks at the turns of a plain loop that asks for batches by `next`.
    ("cycle_loader.py", 43): "it += 1",
    # Only lines for people depend on it; the same in mnist_basic.py has no label.
    ("audio_keywords.py", 68): "for i, (wave, label) in enumerate(loader):",
    # The job names tensors of modules that are no buffers when it saves.
    ("moe.py", 37): "self.bias = torch.zeros(experts)",
    # No rule compares what a state_dict has with what changes.
    ("yolo_like/utils.py", 33): "self.updates += 1",
    # Only a restart within the test copies its middle, which this puts back.
    ("lr_range.py", 44): "self.net.load_state_dict(weights)",
    # No rule knows that a drawn name chooses what all replicas train together.
    ("multitask_text.py", 90): "task = random.choices(list(TASKS), sizes)[0]",
    # What each start writes is mostly the same on all replicas: a hint.
    ("hydra_like/main.py", 32): 'with open(path / "config.yaml", "w") as f:',
    # No rule looks for the next free name.
    ("yolo_like/utils.py", 15): "candidate.mkdir(parents=True)",
    # ER503 names the optimizer that gets it, in the other file (main.py).
    ("simclr/config.py", 32): "return self.optim.lr * ... * world_size() / 256",
    # Many a sum of numbers is no sum over samples, so ER309 leaves torch.sum alone.
    ("fast_style.py", 115): "total_loss.backward()",
    # No rule counts how often replicas without a batch come to a collective.
    ("nnclr_queue.py", 110): "dist.all_reduce(counts)",
    # No rule knows that each replica seeds its generators otherwise.
    ("sac_pendulum.py", 163): "stats.running = ... + 0.05 * episode_return",
    # ER312 knows the sums of tensors, not those of lists made of them.
    ("srcnn.py", 119): 'avg_psnr["psnr"] += sum(... for m in mse.tolist())',
    # What is divided by is counted in the data set.
    ("wav2vec_pre/trainer.py", 36): "loss.backward()",
    # No rule speaks of what is done in each micro-batch.
    ("ddpm.py", 86): "ema.update(net)",
    ("ddpm_trainer.py", 112): "self.ema.update(self.diffusion)",
    ("wav2vec_pre/trainer.py", 40): "self.set_num_updates(...)",
    ("moe.py", 116): "block.moe.rebalance()",
}
FALSE = {
    # As many targets are ignored in each sample, which no line of the loop tells.
    ("mingpt_trainer.py", 68, "ER309"): "self.loss.backward()",
    # The speed is that of this process.
    ("grid_hooks/hooks.py", 19, "ER301"): "self.steps += 1",
    # Another hook of the same epoch reads it, behind `if rank() != 0: return`.
    ("grid_hooks/hooks.py", 65, "ER301"): "self.latest = ...",
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[Measured]:
    folder = tmp_path_factory.mktemp("corpus")
    return [measure(program, folder) for program in PROGRAMS]


def test_each_mistake_is_found(measured: list[Measured]) -> None:
    missed = set().union(*(each.missed for each in measured))
    assert missed == MISSED.keys() | TOLD.keys()


def test_no_alarm_is_false(measured: list[Measured]) -> None:
    false = set().union(*(each.false for each in measured))
    assert false == set(FALSE)


def test_recall_and_precision(measured: list[Measured]) -> None:
    num_mistakes = sum(each.num_mistakes for each in measured)
    num_messages = sum(each.num_messages for each in measured)
    assert len(PROGRAMS) >= 145
    assert num_mistakes >= 355
    assert 1 - len(MISSED) / (num_mistakes - len(TOLD)) >= 0.9
    assert 1 - len(FALSE) / num_messages >= 0.95


def test_each_mechanism_can_still_be_measured() -> None:
    names = runpy.run_path(str(ROOT / "benchmarks" / "lint_mechanisms.py"))
    for owner, attribute, _ in names["MECHANISMS"].values():
        assert callable(getattr(owner, attribute))
