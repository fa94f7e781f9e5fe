"""What a loss is a mean over: samples, things that are counted, or nothing."""

from __future__ import annotations

import ast
import re

from elasticrun.lint.naming import named, written
from elasticrun.lint.values import NO_TAINTS, Value
from elasticrun.lint.walk.functions import Called

# Taints: of a loss that is a mean over counted things, or a sum; and of what it is
# made of: a number of things, and some things of a batch that were selected.
COUNTED, SUMMED, NUMBER, SELECTED = "counted", "summed", "number", "selected"
SHARED = "shared"  # divided by, or multiplied with, the number of replicas
PAIRED = "paired"  # of all pairs of the samples of this replica's part
LEAF = "leaf"  # of a tensor whose own gradient is taken
OF_CRITERIA = frozenset((COUNTED, SUMMED, SHARED))
OF_LOSSES = OF_CRITERIA | {NUMBER, SELECTED}
# These divide by the number of targets that count, or by the sum of their weights.
_WEIGHTED = named("cross_entropy nll_loss CrossEntropyLoss NLLLoss")
_LOSS = re.compile(
    r"torch\.nn\.(?:[\w.]*Loss|functional\.\w*(?:_loss|cross_entropy\w*|kl_div))$"
)
_NUMBERS = re.compile(
    r"(?:^|[_.'\"])(?:num|n)_?(?:tokens?|words|boxes|pos|positives)\b"
)


def taints_of_loss(it: Called, taints: frozenset[str]) -> frozenset[str]:
    """Return what a call's result depends on, if it may be one of torch's losses."""
    if it.name == "torch.masked_select":
        return taints | {SELECTED} if "batch" in taints else taints
    if not _LOSS.match(it.name):
        return taints
    reduction = it.keywords.get("reduction")
    how = "mean" if reduction is None else reduction.constant
    own = NO_TAINTS
    if how == "sum":
        own = frozenset((SUMMED,))
    elif how == "mean" and (SELECTED in taints or _is_weighted(it)):
        own = frozenset((COUNTED,))
    elif how == "none":
        own = taints & {SELECTED}
    return (taints - OF_LOSSES) | own | (taints & {PAIRED})


def _is_weighted(it: Called) -> bool:
    """Return whether not every target counts as one; `weight` may be positional."""
    if it.last not in _WEIGHTED:
        return False
    position = 0 if it.last.endswith("Loss") else 2
    by_place = it.args[position : position + 1]
    weights = [*by_place, *(v for k, v in it.keywords.items() if k == "weight")]
    return any(not each.is_none for each in weights) or "ignore_index" in it.keywords


_MASKED = re.compile(
    r"-100\b|IGNORE_INDEX|DataCollatorFor(?:Language|Seq2Seq|TokenClass|WholeWord)"
)


def taints_of_labels(it: Called, program: str) -> frozenset[str]:
    """Return the taint of the loss that a model makes of labels, if some are masked."""
    is_masked = "labels" in it.keywords and _MASKED.search(program)
    return frozenset((COUNTED,)) if is_masked else NO_TAINTS


def taints_of_method(it: Called, taints: frozenset[str]) -> frozenset[str]:
    """Return what a method's result depends on, if it may be one of a loss."""
    if it.name == "weigh":
        return (taints - OF_LOSSES - {PAIRED}) | {"valid"}
    if it.name == "requires_grad_":
        return taints | {LEAF}
    if it.name == "masked_select" and "batch" in taints:
        return taints | {SELECTED}
    if it.name == "mean" and SELECTED in taints and not it.values:
        return (taints - OF_LOSSES) | {COUNTED}
    return taints


def taints_of_quotient(left: Value, right: Value, node: ast.expr) -> frozenset[str]:
    """Return what a quotient depends on; `node` is what is divided by."""
    taints = left.taints | right.taints
    if right.kind == "const":
        return taints
    if "world_size" in right.taints and "batch" in left.taints:
        return taints | {SHARED}
    if NUMBER in right.taints or _NUMBERS.search(written(node)):
        return (taints - OF_LOSSES) | {COUNTED}
    return taints - {SUMMED, NUMBER}  # over the number of samples, as far as is known


def taints_of_item(node: ast.Subscript, taints: frozenset[str]) -> frozenset[str]:
    """Return what an item depends on, if its key may be a mask that selects some."""
    is_mask = isinstance(node.slice, ast.Compare) or "mask" in written(node.slice)
    is_whole = not isinstance(node.slice, ast.Tuple | ast.Constant)
    return taints | {SELECTED} if is_mask and is_whole and "batch" in taints else taints


def taints_of_product(left: Value, right: Value, node: ast.expr) -> frozenset[str]:
    """Return what a product of matrices depends on; `node` is the right one."""
    taints = left.taints | right.taints
    is_turned = bool(re.search(r"\.T$|\.t\(\)$", written(node)))
    has_both = "batch" in left.taints and "batch" in right.taints
    return taints | {PAIRED} if is_turned and has_both else taints
