"""Every shape annotation of `src` is written in the alphabet of `maxdiffusion.mesh.dims`."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from maxdiffusion.mesh.dims import ALPHABET

ROOT = Path(__file__).parents[2]
ARRAY_TYPES = {"Bool", "Float", "Float32", "Int", "Int32", "Num", "Shaped", "UInt8", "UInt32"}


def shapes(source: str) -> Iterator[str]:
    """Yields the shape of every `Float[Array, "..."]` in the source."""
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name)):
            continue
        if node.value.id in ARRAY_TYPES:
            assert isinstance(node.slice, ast.Tuple), ast.unparse(node)
            shape = node.slice.elts[1]
            assert isinstance(shape, ast.Constant), ast.unparse(node)
            yield shape.value


def unknown_symbols(shape: str) -> set[str]:
    """Returns the names in a shape that the alphabet lacks; `*dims` stands for any number."""
    return set(re.findall(r"[A-Za-z]\w*", shape.replace("*dims", ""))) - ALPHABET


def files_with_shapes() -> list[Path]:
    return [
        path for path in sorted((ROOT / "src").rglob("*.py")) if "jaxtyping" in path.read_text()
    ]


@pytest.mark.parametrize(
    "path", files_with_shapes(), ids=lambda path: f"{path.parent.name}.{path.stem}"
)
def test_shapes_use_the_alphabet(path):
    assert not {shape for shape in shapes(path.read_text()) if unknown_symbols(shape)}


def test_an_unknown_symbol_is_found():
    (shape,) = shapes('def f(x: Float[Array, "B q T+1 _U *dims ..."]): ...')
    assert unknown_symbols(shape) == {"q"}


def test_ruff_knows_the_alphabet():
    ruff = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]
    assert set(ruff["builtins"]) == {symbol for symbol in ALPHABET if symbol.isupper()}
