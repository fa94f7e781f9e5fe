"""Named entities of CoNLL 2003."""
import argparse
import logging
import os

import torch
import torch.nn as nn
import torch.nn.functional as F
from metrics import EarlyStopping, SpanF1
from model import TaggedSentences, Tagger, Vocabulary, collate, read_conll

from elasticrun import AdaptiveDataLoader, AdaptiveDataParallel, device, rank, remaining_epochs_until

logger = logging.getLogger("ner")


def train_epoch(model, optimizer, loader, dev: torch.device, clip: float) -> None:
    model.train()
    for words, tags in loader:
        logits = model(words.to(dev))
        loss = F.cross_entropy(logits.flatten(0, 1), tags.to(dev).flatten(), ignore_index=-100)  # MISTAKE: weigh: a mean over this share's words, of which each replica has another number; model.weigh(loss, number of words) (or line with: loss.backward())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


@torch.no_grad()
def evaluate(net: Tagger, loader: AdaptiveDataLoader, vocabulary: Vocabulary, dev: torch.device) -> float:
    net.eval()
    metric = SpanF1()  # ARGUABLE: its sums are marked in metrics.py
    for words, tags in loader:
        predicted = net(words.to(dev)).argmax(2).tolist()
        for row, gold in zip(predicted, tags.tolist()):
            gold = [vocabulary.tags[t] for t in gold if t != -100]
            metric.update(gold, [vocabulary.tags[t] for t in row[: len(gold)]])  # ARGUABLE: the same
    return metric.compute()  # ARGUABLE: the same


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default="conll2003")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--clip", type=float, default=5.0)
    parser.add_argument("--patience", type=int, default=7)
    parser.add_argument("--out", default="ner.pt")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO if rank() == 0 else logging.WARNING)
    torch.manual_seed(0)
    dev = device()
    train_sentences, valid_sentences = (read_conll(os.path.join(args.data, name)) for name in ("eng.train", "eng.testa"))
    vocabulary = Vocabulary(train_sentences)
    train = AdaptiveDataLoader(TaggedSentences(train_sentences, vocabulary), batch_size=args.batch_size, shuffle=True, collate_fn=collate)
    valid = AdaptiveDataLoader(TaggedSentences(valid_sentences, vocabulary), batch_size=256, even_batches=False, collate_fn=collate)
    net = Tagger(len(vocabulary.words) + 2, len(vocabulary.tags)).to(dev)
    optimizer = torch.optim.Adam(net.parameters(), lr=args.lr)
    model = AdaptiveDataParallel(net, optimizer)
    stopper = EarlyStopping(args.patience)  # ARGUABLE: its values are marked in metrics.py
    for epoch in remaining_epochs_until(args.epochs):
        train_epoch(model, optimizer, train, dev, args.clip)
        f1 = evaluate(net, valid, vocabulary, dev)
        logger.info("epoch %d F1 %.4f", epoch, f1)  # ARGUABLE: marked where it is counted
        if stopper(f1) and rank() == 0:  # ARGUABLE: the same
            torch.save({"tags": vocabulary.tags, "words": vocabulary.words, "net": net.state_dict()}, args.out)
        if stopper.early_stop:  # ARGUABLE: decided by the F1 of one replica, marked where it is counted
            logger.info("no better for %d epochs", args.patience)
            break  # ARGUABLE: decided by the F1 of one replica, so replicas may leave at different epochs; follows from the counts, which are marked


if __name__ == "__main__":
    main()
