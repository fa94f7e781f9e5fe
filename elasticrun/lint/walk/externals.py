"""Calls of what is not in the project."""

from __future__ import annotations

from elasticrun.lint import catalog, roles
from elasticrun.lint.graph import LOG, OPTIMIZER, SAVE, TRACK, Sink
from elasticrun.lint.values import Value, unknown
from elasticrun.lint.walk.called import Called, Site
from elasticrun.lint.walk.language import Language


class Externals(Language):
    """Knows what calls of other packages do."""

    def call_external(self, name: str, site: Site) -> Value:
        """Return what an external call makes, noting its effects."""
        node, frame, is_iterated, given = site
        elastic = roles.elastic_name(name)
        if elastic or name.rpartition(".")[2] in self.options.loaders:
            name = elastic or "AdaptiveDataLoader"
            return self.call_elastic(name, node, frame, given)
        args, keywords = given or self.arguments(node, frame, self._sink_for(name))
        it = Called(name, node, args, keywords, frame, is_iterated)
        files = [each for each in it.values if each.kind == "file"]
        if files and (name in catalog.SAVES or name == "print"):
            self.note("file_written", node, files[0], name)
        for find in (self.effect, self.object_made, self.language):
            value = find(it)
            if value is not None:
                return value
        return self._opaque(it)

    def _sink_for(self, name: str) -> Sink:
        if name in catalog.LOGGERS:
            return TRACK if name in catalog.TRACKING else LOG
        return SAVE if name in catalog.SAVES else self.sink

    def call_unknown(self, callee: Value, name: str, site: Site) -> Value:
        """Return what a call of something unknown returns."""
        node, frame, is_iterated, _ = site
        sink = OPTIMIZER if callee.kind in ("model", "optimizer") else self.sink
        args, keywords = self.arguments(node, frame, sink)
        return self._opaque(Called(name, node, args, keywords, frame, is_iterated))

    def _opaque(self, it: Called) -> Value:
        """Return what a call returns of which nothing is known but its arguments."""
        if it.name in roles.ITERATED_SAMPLERS:
            return Value("sampler", it.name, parts=it.values, node=it.node)
        loaders = [each for each in it.values if self.loaders_in(each)]
        if loaders and it.last not in catalog.LOOKING:
            looks_like_class = it.last[:1].isupper()
            if self.epoch is None or it.is_iterated or looks_like_class:
                return Value("wrapped", it.last, parts=it.values, node=it.node)
            self.assume_loop(loaders[0], it.node, it.frame, sure=False)
        self.note_seeds(it)
        for each in it.values:
            each.is_handed_on = True
        value = unknown(taints=it.taints - {"path"})  # of a path, not a path
        self.write((value.uid, "[]"), it.node, "set", value, "")
        return value
