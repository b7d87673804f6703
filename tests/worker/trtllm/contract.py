"""Compares the names of a typed stub with unpacked sources. Nothing is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

# Compiled: no sources to read.
COMPILED = ("bindings",)
# Where a class's names may stand as well: it is made of these.
MADE_OF = {
    "LLM": ("BaseLLM", "_TorchLLM", "BaseLlmArgs", "TorchLlmArgs"),
    "TorchLlmArgs": ("BaseLlmArgs",),
    "RequestOutput": ("GenerationResult", "DetokenizedGenerationResultBase"),
    "GenerationResult": ("GenerationResultBase",),
}


def missing(stub: Path, sources: Path) -> Iterator[str]:
    """`module: Class.name` for each name of the stub's that the sources have not.

    Both are folders that hold `tensorrt_llm`.
    """
    known = _Known(sources / "tensorrt_llm")
    for path in sorted((stub / "tensorrt_llm").rglob("*.pyi")):
        module = path.relative_to(stub).with_suffix(".py")
        if set(module.parts) & set(COMPILED):
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                for name in sorted(_names(node) - known.names(node.name)):
                    yield f"{module}: {node.name}.{name}"


class _Known:
    """Classes of the sources, by name, wherever they are."""

    def __init__(self, package: Path) -> None:
        self._classes: dict[str, list[ast.ClassDef]] = {}
        for path in package.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(errors="replace"))):
                if isinstance(node, ast.ClassDef):
                    self._classes.setdefault(node.name, []).append(node)

    def names(self, class_name: str, seen: frozenset[str] = frozenset()) -> set[str]:
        if class_name in seen:
            return set()
        found: set[str] = set()
        for node in self._classes.get(class_name, ()):
            found |= {node.name, *_names(node)}
            bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
            for base in (*bases, *MADE_OF.get(class_name, ())):
                found |= self.names(base, seen | {class_name})
        return found


def _names(node: ast.ClassDef) -> set[str]:
    """Fields, methods, and the names of what these take."""
    names = {node.name}
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            names.add(item.target.id)
        elif isinstance(item, ast.Assign):
            names |= {target.id for target in item.targets if isinstance(target, ast.Name)}
        elif isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(item.name)
            names |= {each.arg for each in (*item.args.args, *item.args.kwonlyargs)}
    # What every class has, spelled out or not.
    return names - {"self", "__init__", "__await__", "__exit__", "__enter__", "a", "b", "c", "kw"}
