"""Source files as modules: reading, parsing, and finding what an import names."""

from __future__ import annotations

import ast
import contextlib
import functools
import io
import itertools
import os
import re
import sys
import tokenize
import warnings
from collections import deque
from collections.abc import Iterator
from pathlib import Path

ELASTIC = re.compile(
    r"\b(elasticrun|adaptdl|remaining_epochs_until|AdaptiveDataLoader)\b"
)
MAX_BYTES = 1_000_000
_MAX_IMPORTS = 5_000
_NEAREST = 200  # So many files may be one program; farther ones are a library.
# Python's parser takes memory by the square of such a name's length.
_ENDLESS = re.compile(r"(?:\w{1,64}\.){999}")
_LINE_END = r"\r\n|\r|\n"
_TRAINING = re.compile(
    r"\b(?:torch|elasticrun|adaptdl)\b|epoch|loader|optimizer|scheduler"
)
_IGNORE = re.compile(r"#\s*elasticrun:\s*ignore(?:\[(?P<codes>[\w\s,]*)\])?")
# `from SOURCE import NAMES` and `import NAMES`.
_IMPORT = re.compile(
    r"(?:^|[;:])[ \t]*(?:from[ \t]+([.\w]+)[ \t]+)?import\b[ \t]*"
    r"(?:\(((?:#[^\n]*\n|[^#)])*)\)|((?:[^\n;\\]|\\\r?\n)+))",
    re.MULTILINE,
)
_COMMENT = re.compile(r"#[^\n]*|\\")
# Never the project's own, whatever lies beside the file.
_FOREIGN = sys.stdlib_module_names | {"torch", "numpy", "elasticrun", "adaptdl"}
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_SKIPPED = {
    ".git", ".ipynb_checkpoints", ".venv", "venv", "__pycache__", "node_modules",
    "site-packages",
}  # fmt: skip


class Module:
    """One source file.

    Args:
        is_file: Whether the file has this text, so that it need not be held.

    Attributes:
        name: What the file is called in messages.
        leads_to_elastic: Whether it is elastic or imports, in any number of steps, a
            module that is; None if nobody has asked yet.
    """

    def __init__(
        self, path: Path, name: str, text: str, *, is_file: bool = False
    ) -> None:
        self.path = path
        self.folder = str(path.parent)
        self.name = name
        self._text: str | None = text
        self._is_file = is_file
        self.error: SyntaxError | None = None
        self.tree: ast.Module | None = None
        self.is_elastic = bool(ELASTIC.search(text))
        self._has_comments = "elasticrun:" in text
        self.leads_to_elastic: bool | None = True if self.is_elastic else None
        self.imported_by: set[str] = set()
        self.imports: list[Module] | None = None

    @property
    def text(self) -> str:
        if self._text is None:
            self._text = decode(self.path.read_bytes())
        return self._text

    def forget(self) -> None:
        """Let go of the text, and of the tree, which takes some fifty times as much."""
        self.tree = None
        if self._is_file:
            self._text = None
            self.__dict__.pop("lines", None)

    def parse(self) -> ast.Module | None:
        """Parse once; keep the error of a file that cannot be parsed."""
        if self.tree is None and self.error is None:
            try:
                if _ENDLESS.search(self.text):
                    raise ValueError("it has a name of a thousand parts")
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    self.tree = ast.parse(self.text, filename=self.name)
            except SyntaxError as error:
                self.error = error
            except (ValueError, RecursionError, MemoryError) as error:
                self.error = SyntaxError(str(error))
        return self.tree

    @property
    def is_about_training(self) -> bool:
        """Whether anything in it may matter to an epoch loop elsewhere."""
        return bool(_TRAINING.search(self.text))

    @functools.cached_property
    def lines(self) -> list[str]:
        return re.split(_LINE_END, self.text)

    def line(self, number: int) -> str:
        return self.lines[number - 1] if 0 < number <= len(self.lines) else ""

    @functools.cached_property
    def suppressions(self) -> dict[int, set[str]]:
        """The codes that `# elasticrun: ignore[CODES] reason` hides, by line.

        A comment without codes hides all, which is an empty text here; one on a line of
        its own speaks for the next line.
        """
        found: dict[int, set[str]] = {}
        if not self._has_comments:
            return found
        with contextlib.suppress(tokenize.TokenError, SyntaxError):
            for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
                match = _IGNORE.match(token.string)
                if match and token.type == tokenize.COMMENT:
                    line, column = token.start
                    line += not token.line[:column].strip()
                    codes = match["codes"]
                    listed = {""} if codes is None else set(re.findall(r"\w+", codes))
                    found.setdefault(line, set()).update(listed)
        return found


def statements_of(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements in a body, of any depth, but not of functions in it."""
    todo = [node]
    while todo:
        each = todo.pop()
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            for inner in getattr(each, field, ()):
                yield inner
                if not isinstance(inner, _SCOPES):
                    todo.append(inner)


def names_imported(text: str) -> Iterator[tuple[str, int]]:
    """Yield what imports name, wherever they stand, each with its level.

    By the text: a tree of each file of a large project would take minutes. What looks
    like an import in a string is one here.
    """
    for source, inside, plain in _IMPORT.findall(text):
        names = _COMMENT.sub("", inside or plain)
        listed = [each.split()[0] for each in names.split(",") if each.strip()]
        if not source:
            yield from ((name, 0) for name in listed)
            continue
        module = source.lstrip(".")
        level = len(source) - len(module)
        yield module, level
        yield from ((f"{module}.{name}", level) for name in listed)


def decode(data: bytes) -> str:
    """Return a source's text in the encoding that it declares.

    Raises:
        SyntaxError, UnicodeDecodeError: It is not text in that encoding.
    """
    encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    return data.decode(encoding)


class Project:
    """The modules that belong together, found by path when something imports them."""

    def __init__(self) -> None:
        self.modules: dict[Path, Module | None] = {}
        self._found: dict[tuple[str, str, int], Module | None] = {}
        self._names: dict[Path, frozenset[str]] = {}  # What folders have in them.

    def load(self, path: Path, name: str | None = None) -> Module | None:
        """Return the module of a file, or None if it cannot be read or is too large."""
        key = path.absolute()
        if key not in self.modules:
            try:
                if not path.is_file():  # Opening a pipe waits for who writes to it.
                    raise OSError("no regular file")
                if path.stat().st_size > MAX_BYTES:
                    raise ValueError("too large")
                text = decode(path.read_bytes())
                module = Module(key, name or str(path), text, is_file=True)
                if not module.is_elastic:
                    module.forget()
                self.modules[key] = module
            except (OSError, SyntaxError, ValueError, LookupError):
                self.modules[key] = None
        return self.modules[key]

    def find(self, dotted: str, importer: Module, level: int = 0) -> Module | None:
        """Return the project's module of that name as `importer` would import it."""
        key = (dotted, importer.folder, level)
        if key not in self._found:
            self._found[key] = self._look_for(dotted, importer, level)
        return self._found[key]

    def imports(self, module: Module) -> list[Module]:
        """Return the project's modules that a module imports, anywhere in it."""
        if module.imports is None:
            every = itertools.islice(names_imported(module.text), _MAX_IMPORTS)
            names = dict.fromkeys(every)
            found = (self.find(name, module, level) for name, level in names)
            module.imports = [each for each in found if each not in (None, module)]
            if not module.is_elastic:
                module.forget()
        return module.imports

    def reached(self, module: Module) -> list[Module]:
        """Return a module, and the nearest that it imports in any number of steps."""
        found = {module: None}
        todo = deque(found)
        while todo and len(found) < _NEAREST:
            imported = self.imports(todo.popleft())
            own = (e for e in imported if "site-packages" not in e.path.parts)
            new = [each for each in own if each not in found]
            todo += new
            found |= dict.fromkeys(new)
        return [*found]

    def leads_to_elastic(self, module: Module) -> bool:
        """Return whether a module is elastic, or imports one of the project that is."""
        if module.leads_to_elastic is None:
            seen, todo = {module}, [module]
            while todo and not any(each.leads_to_elastic for each in todo):
                each = todo.pop()
                new = [m for m in self.imports(each) if m not in seen]
                seen.update(new)
                todo += [m for m in new if m.leads_to_elastic is not False]
            if not todo:
                for each in seen:
                    each.leads_to_elastic = False
            module.leads_to_elastic = bool(todo)
        return module.leads_to_elastic

    def _look_for(self, dotted: str, importer: Module, level: int) -> Module | None:
        parts = [part for part in dotted.split(".") if part]
        if not level and (not parts or parts[0] in _FOREIGN):
            return None
        *above, name = parts or ["__init__"]
        roots = self._roots(importer, level, *parts[:1])
        every = (self._in(root.joinpath(*above), name, importer) for root in roots)
        return next((found for found in every if found is not None), None)

    def _roots(self, importer: Module, level: int, first: str = "") -> list[Path]:
        folder = importer.path.parent
        if level:
            above = [folder, *folder.parents]
            return above[level - 1 : level]
        roots = [folder]
        while "__init__.py" in self._names_in(folder) and folder != folder.parent:
            folder = folder.parent
            roots.append(folder)
        if folder.name in ("scripts", "bin", "tools", "examples"):
            roots += [folder.parent, folder.parent / "src"]
        # A package may do without an __init__.py.
        roots += [each.parent for each in importer.path.parents if each.name == first]
        return roots

    def _in(self, folder: Path, name: str, importer: Module) -> Module | None:
        file, package = folder / f"{name}.py", folder / name / "__init__.py"
        names = self._names_in(folder)
        # Only folders that are there are listed: what is imported is mostly none.
        is_package = name in names and package.name in self._names_in(package.parent)
        for path, is_there in ((file, file.name in names), (package, is_package)):
            if is_there or path.absolute() in self.modules:
                return self.load(path, display_name(path, importer))
        return None

    def _names_in(self, folder: Path) -> frozenset[str]:
        """Return what a folder has in it; asking for each file would take longest."""
        if folder not in self._names:
            names: list[str] = []
            with contextlib.suppress(OSError):
                names = os.listdir(folder)
            self._names[folder] = frozenset(names)
        return self._names[folder]

    def forget(self) -> None:
        """Let go of what the modules can read again."""
        for module in self.modules.values():
            if module is not None:
                module.forget()


def display_name(path: Path, importer: Module) -> str:
    """Return what to call an imported file: the way its importer was named."""
    try:
        base = Path(importer.name).parent
        relative = path.absolute().relative_to(importer.path.parent)
    except ValueError:
        return str(path)
    return str(base / relative)


def python_files(path: Path) -> list[Path]:
    """Return the Python files of a path: itself, or all below it."""
    if path.is_file():
        return [path]
    found: list[Path] = []
    for folder, folders, files in os.walk(path):
        folders[:] = [each for each in folders if each not in _SKIPPED]
        found += (Path(folder, each) for each in files if each.endswith(".py"))
    return sorted(each for each in found if each.is_file())
