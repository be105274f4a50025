"""The rules about imports that import-linter cannot express."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("launch", "runtime", "grammar_sync", "tp", "pp", "sampler")
ALLOWED = {
    "torch.distributed": ("launch/", "tp/", "pp/"),
    "xgrammar": ("grammar_sync/engines/xgrammar_backend.py",),
    "llguidance": ("grammar_sync/engines/llguidance_backend.py",),
    "zmq": ("runtime/client_socket.py",),
    "tokenizers": ("runtime/tokenizer.py", "runtime/gguf_tokenizer.py", "runtime/tokenizer_"),
}


def imports_of(path: Path) -> list[tuple[str, bool]]:
    """Returns the modules that a file imports, and whether each import stands at the top level."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    top = set(map(id, ast.iter_child_nodes(tree)))
    for node in ast.iter_child_nodes(tree):
        # __main__ chooses the role before anything is imported; xgrammar is imported without transformers.
        if isinstance(node, (ast.If, ast.With)):
            top.update(map(id, ast.walk(node)))
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) in top) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append((node.module, id(node) in top))
            found += [(f"{node.module}.{alias.name}", id(node) in top) for alias in node.names]
    return found


SOURCES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def test_there_are_sources() -> None:
    assert len(SOURCES) > 30


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_stay_in_their_place(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    for module, at_top in imports_of(path):
        assert at_top, f"{name} imports {module} inside a function"
        for restricted, places in ALLOWED.items():
            if module == restricted or module.startswith(restricted + "."):
                assert name.startswith(places), f"{name} imports {module}, which only {places} may"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_assert_and_no_global(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    bad = [node.lineno for node in ast.walk(tree) if isinstance(node, (ast.Assert, ast.Global))]
    assert bad == []


def test_every_error_stands_in_the_documented_tree() -> None:
    documented = (ROOT / "docs" / "contributing.md").read_text(encoding="utf-8")
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            bases = {base.id for base in getattr(node, "bases", []) if isinstance(base, ast.Name)}
            if (
                isinstance(node, ast.ClassDef)
                and not node.name.startswith("_")
                and bases & {"ValueError", "RuntimeError", "BaseException"}
            ):
                assert re.search(rf"\b{node.name}\b", documented), (
                    f"{path.name}: {node.name} is not in the tree of errors"
                )
