"""Calls that do something: draw, seed, write, send, log, wait for the others."""

from __future__ import annotations

from elasticrun.lint import catalog, roles
from elasticrun.lint.values import NO_TAINTS, Value, constant, unknown
from elasticrun.lint.walk.called import Called
from elasticrun.lint.walk.elastic import Elastic

_UNFIXED = frozenset(("time", "entropy", "random"))
_ON_GRADIENTS = frozenset(("clip_grad_norm_", "clip_grad_value_", "backward"))


_SPLITTERS = ("sklearn.model_selection.", "sklearn.utils.")


class Effects(Elastic):
    """Notes effects."""

    def effect(self, it: Called) -> Value | None:
        """Return what a call with an effect returns; None if it has none."""
        if it.name in catalog.SEEDERS:
            return self._seed(it)
        if it.name in catalog.DRAWS:
            return self._draw(it)
        if it.name in catalog.LOGGERS:
            self.note("logged", it.node, data=it.name)
            return constant(None)
        if it.name.startswith(_SPLITTERS) and _shuffles(it):
            return self._draw(it)
        return self._outer_effect(it) or self._effect_on_all(it)

    def _outer_effect(self, it: Called) -> Value | None:
        """Note what changes files and services."""
        if it.name in catalog.OUTSIDE:
            self.note("outside", it.node, data=it.name)
        elif it.name in catalog.UNREPEATABLE or it.name == "os.makedirs":
            data = (it.name, set(it.keywords), self.catching)
            self.note("file_moved", it.node, data=data)
        elif it.name in catalog.SAVES:
            self.note("saved", it.node, data=(it.name, it.args))
        else:
            return None
        return unknown()

    def _effect_on_all(self, it: Called) -> Value | None:
        """Note what changes weights, and what all replicas do together."""
        if it.last in catalog.COLLECTIVES and it.name.startswith(
            ("torch.distributed", "dist")
        ):
            self.note("collective", it.node, data=it.last)
            return unknown(taints=it.taints - {"rank"})
        if it.name.startswith("torch.nn.init.") or "prune" in it.name.split("."):
            self.note("weights", it.node, it.args[0] if it.args else None, it.name)
        elif it.last == "update_bn" and it.args:
            self.assume_loop(it.args[0], it.node, it.frame, sure=True)
        elif it.last not in _ON_GRADIENTS:
            return None
        return unknown()

    def _draw(self, it: Called) -> Value:
        own = next((each for each in it.values if each.kind == "rng"), None)
        by_name = {"generator", "random_state", "seed"} & it.keywords.keys()
        is_keyed = bool(by_name) or own is not None
        self.note_seeds(it)
        is_seeded = self.is_seeded(it.name)
        self.note("draw", it.node, own, (it.name, is_keyed, is_seeded))
        is_same = is_keyed or (self.epoch is None and is_seeded)
        return unknown(taints=NO_TAINTS if is_same else frozenset(("random",)))

    def note_seeds(self, it: Called) -> None:
        """Note a seed that a call gets by keyword, if it is no fixed one."""
        for key in ("seed", "random_state"):
            value = it.keywords.get(key)
            if value is not None and value.taints & _UNFIXED:
                self.note("seeded", it.node, data=(it.name, [value]))

    def _seed(self, it: Called) -> Value | None:
        self.note("seeded", it.node, data=(it.name, it.values))
        if roles.made_by(it.name) == "rng":
            return None  # a generator of its own; the global one is as it was
        if it.values and not it.taints & _UNFIXED:
            self.has_seeded.add(it.name.split(".", 1)[0])
        return unknown()

    def is_seeded(self, name: str) -> bool:
        """Return whether the generator behind a draw has been given a seed."""
        family = name.split(".", 1)[0]
        family = "numpy" if family == "sklearn" else family
        general = self.has_seeded - {"torch", "numpy", "random"}
        return family in self.has_seeded or bool(general)


def _shuffles(it: Called) -> bool:
    shuffle = it.keywords.get("shuffle")
    is_asked = shuffle is not None and shuffle.kind == "const" and bool(shuffle.data)
    return is_asked or it.last.endswith("ShuffleSplit")
