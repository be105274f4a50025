"""Libraries that are built when they are wanted: once, whole, by any number of processes, or with one clear error."""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tp.compiled_library import BuildError, build_library, cache_folder, compiler

FLAGS = ("-shared", "-fPIC")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    try:
        compiler(os.environ)
    except BuildError as error:
        pytest.skip(str(error))
    path = tmp_path / "seven.c"
    path.write_text("int number(void) { return NUMBER; }\n")
    return path


def build(source: Path, number: int = 7, environ: dict[str, str] | None = None) -> Path:
    flags = (*FLAGS, f"-DNUMBER={number}")
    return build_library(source, flags, (), source.parent / "cache", environ or dict(os.environ))


def test_many_build_at_once_and_all_get_one_whole_library(source: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(lambda _: build(source), range(4)))
    (path,) = paths
    assert ctypes.CDLL(str(path)).number() == 7
    assert list(path.parent.iterdir()) == [path]
    before = path.stat().st_mtime_ns
    assert build(source) == path
    assert path.stat().st_mtime_ns == before


def test_another_source_or_flag_is_another_library(source: Path) -> None:
    first, second = build(source), build(source, 8)
    source.write_text(source.read_text() + "\n")
    third = build(source)
    assert len({first, second, third}) == 3
    assert [ctypes.CDLL(str(path)).number() for path in (first, second, third)] == [7, 8, 7]


@pytest.mark.parametrize("damage", ["cut", "empty", "changed", "no library"])
def test_a_damaged_library_is_built_anew(source: Path, damage: str) -> None:
    """Loading one would end the process; nobody would think of the file."""
    path = build(source)
    whole = path.read_bytes()
    path.write_bytes(
        {
            "cut": whole[: len(whole) // 2],
            "empty": b"",
            "changed": whole[:200] + bytes([whole[200] ^ 1]) + whole[201:],
            "no library": b"nothing of the kind" * 100,
        }[damage]
    )
    assert build(source) == path
    assert path.read_bytes() == whole
    assert ctypes.CDLL(str(path)).number() == 7


def test_what_cannot_be_built_leaves_nothing(source: Path) -> None:
    source.write_text("int number(void) { return }\n")
    with pytest.raises(BuildError, match="cannot be built by "):
        build(source)
    assert list((source.parent / "cache").iterdir()) == []


def test_a_compiler_that_fails_or_makes_nothing(source: Path) -> None:
    with pytest.raises(BuildError, match="cannot be built by false: no word of why"):
        build(source, environ=dict(os.environ, CC="false"))
    with pytest.raises(BuildError, match="cannot be built by true: it made no file"):
        build(source, environ=dict(os.environ, CC="true"))


def test_a_cache_folder_that_cannot_be_made(source: Path) -> None:
    (source.parent / "cache").write_text("a file")
    with pytest.raises(BuildError, match=r"cannot be built or kept in .*cache"):
        build(source)


def test_without_a_compiler(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="cc or gcc or clang is not there"):
        compiler({"PATH": str(tmp_path)})
    with pytest.raises(BuildError, match="CC is no command"):
        compiler({"CC": "gcc '", "PATH": os.environ["PATH"]})


def test_where_libraries_are_kept() -> None:
    assert cache_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/lockstep")
    assert cache_folder({}).name == "lockstep"
    assert cache_folder({"XDG_CACHE_HOME": "x"}) == cache_folder({}), "a relative path counts for nothing there"
