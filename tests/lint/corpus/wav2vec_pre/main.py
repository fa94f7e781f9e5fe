"""Self-supervised pretraining on audio.  elasticrun run --replicas 8 main.py data/librispeech"""
import argparse
import json
import math
import os

import torch
from dataset import MaskedAudio
from model import InfoNceCriterion, Wav2VecLike
from trainer import Trainer

from elasticrun import Accumulator, AdaptiveDataLoader, LogFile, atomic_save, rank, remaining_epochs_until


def get_parser():
    parser = argparse.ArgumentParser()
    parser.add_argument("data")
    parser.add_argument("--max-sample-size", type=int, default=80_000)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--max-sentences", type=int, default=8, help="per forward pass")
    parser.add_argument("--mask-prob", type=float, default=0.65)
    parser.add_argument("--mask-length", type=int, default=10)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--clip-norm", type=float, default=1.0)
    parser.add_argument("--warmup-updates", type=int, default=8000)
    parser.add_argument("--max-update", type=int, default=100_000)
    parser.add_argument("--max-epoch", type=int, default=100)
    parser.add_argument("--patience", type=int, default=5)
    parser.add_argument("--save-dir", default="checkpoints")
    return parser


def should_stop_early(args, valid_loss):
    """As in fairseq, the best value so far is kept on the function."""
    prev_best = getattr(should_stop_early, "best", None)
    if prev_best is None or valid_loss < prev_best:
        should_stop_early.best = valid_loss
        should_stop_early.num_runs = 0
        return False
    should_stop_early.num_runs += 1  # MISTAKE: lost: attributes of a function do not come back: each restart begins with no best value and a full patience, so the job trains longer (or line with: should_stop_early.best = valid_loss) (or line with: should_stop_early.num_runs = 0) (or line with: prev_best = getattr(should_stop_early, "best", None)) (or line with: return should_stop_early.num_runs >= args.patience) (or line with: if should_stop_early(args, stats["loss"]):)
    return should_stop_early.num_runs >= args.patience


def reduce(outputs):
    with outputs.synchronized():
        size = float(outputs["sample_size"])
        stats = {"loss": float(outputs["loss"]) / size / math.log(2), "accuracy": float(outputs["correct"]) / size}
    return stats


def train(args, trainer, loader):
    outputs = Accumulator()
    for sample in loader:
        log = trainer.train_step(sample)  # ARGUABLE: runs in each micro-batch; the counter to move is in trainer.py
        if loader.num_valid:  # not for padding
            outputs.update(log)
    return reduce(outputs)


def validate(args, trainer, loader):
    outputs = Accumulator()
    for sample in loader:
        outputs.update(trainer.valid_step(sample))
    return reduce(outputs)


def main():
    args = get_parser().parse_args()
    torch.manual_seed(1)
    os.makedirs(args.save_dir, exist_ok=True)
    make = lambda split: MaskedAudio(
        os.path.join(args.data, split), args.max_sample_size, 80, args.mask_prob, args.mask_length, split == "train"
    )
    model = Wav2VecLike()
    trainer = Trainer(args, model, InfoNceCriterion())
    train_iter = AdaptiveDataLoader(
        make("train"), batch_size=args.batch_size, shuffle=True, drop_last=True,
        max_local_batch_size=args.max_sentences, num_workers=4, name="train",
    )
    valid_iter = AdaptiveDataLoader(make("valid"), batch_size=args.max_sentences, even_batches=False, name="valid")
    log = LogFile(os.path.join(args.save_dir, "train_log.jsonl"))

    for epoch in remaining_epochs_until(args.max_epoch, start=1):
        train_stats = train(args, trainer, train_iter)
        stats = validate(args, trainer, valid_iter)
        row = {"epoch": epoch, "num_updates": trainer.get_num_updates()}
        row.update({f"train_{k}": v for k, v in train_stats.items()})
        row.update({f"valid_{k}": v for k, v in stats.items()})
        log.write(json.dumps(row) + "\n")
        if stats["loss"] < trainer.state.best_loss:
            trainer.state.best_loss = stats["loss"]
            if rank() == 0:
                atomic_save(model.state_dict(), os.path.join(args.save_dir, "checkpoint_best.pt"))
        if should_stop_early(args, stats["loss"]):
            break
        if trainer.get_num_updates() >= args.max_update:
            break


if __name__ == "__main__":
    main()
