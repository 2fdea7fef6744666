"""Compiled kernels in their cache: the digest, damaged files, and removal of old folders."""

import errno
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from edgeinfer.model_config.weights import read_config, read_weights
from edgeinfer_kernels.blocks import BLOCK_KINDS
from edgeinfer_kernels.cpu.blocks import units_of
from edgeinfer_kernels.cpu.compiler.features import INSTRUCTION_SETS, choose
from edgeinfer_kernels.cpu.compiler.kernel_cache import (
    KernelBuildError,
    KernelCache,
    build_groups,
    kernel_sources,
    object_file,
    objects_folder,
    source_digest,
)
from edgeinfer_kernels.cpu.compiler.kernel_folders import DAY, mark_used, remove_unused
from edgeinfer_kernels.cpu.compiler.kernel_folders import kernel_folders as folders_below
from edgeinfer_kernels.cpu.compiler.kernel_units import SERVICE, kernel_units, sparse_units
from edgeinfer_kernels.cpu.compiler.units import PARTS
from edgeinfer_kernels.system.private_folder import distrust_reason, temporary_root
from edgeinfer_quant_formats import GGUFFile
from tests.kernels.system.marks import NEEDS_MODES
from tests.model_zoo import ZOO

LOADED = """
import importlib
import sys
import edgeinfer_kernels.cpu.compiler.build_object
for unit in sys.argv[1:]:
    importlib.import_module(f"edgeinfer_kernels.cpu.native.blocks.{unit}")
for name, module in sorted(sys.modules.items()):
    is_kernel = name.startswith("edgeinfer_kernels.") and not module.__file__.endswith("__init__.py")
    if is_kernel or name == "edgeinfer_quant_formats.formats":
        print(module.__file__)
"""


def make(root: Path, name: str, days_ago: float) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "blocks.o").write_bytes(b"code")
    os.utime(folder, (time.time() - days_ago * DAY,) * 2)
    return folder


def named(target: str, digit: str) -> str:
    return f"x86_64-{target}-{digit * 16}"


@pytest.mark.slow
def test_the_digest_covers_the_modules_that_the_compiler_loads_and_no_others() -> None:
    # The child has to import the packages of this process, from the checkout or installed.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    units = [unit for unit in units_of(BLOCK_KINDS) if unit not in PARTS]
    done = subprocess.run(
        [sys.executable, "-c", LOADED, *units, SERVICE],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    loaded = {Path(line).resolve() for line in done.stdout.splitlines()}
    assert loaded == {path.resolve() for path in kernel_sources() if path.name != "__init__.py"}


def test_each_instruction_set_has_a_separate_digest() -> None:
    digests = {source_digest(isa) for isa in INSTRUCTION_SETS}
    assert len(digests) == len(INSTRUCTION_SETS)


def test_only_intact_objects_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = KernelCache(tmp_path, choose())

    def compiled(units: list[str], folder: str) -> Iterator[str]:
        for unit in units:
            object_file(folder, unit).write_bytes(unit.encode())
            yield unit

    monkeypatch.setattr(store, "compile", compiled)
    reported: list[tuple[int, int]] = []
    assert store.objects(["a", "b"], lambda built, total: reported.append((built, total))) == [b"a", b"b"]
    assert reported == [(0, 2), (1, 2), (2, 2)]
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == [store.folder]
    (store.folder / "a.o").write_bytes(b"x" * 40)
    assert store.find("a") is None
    assert store.objects(["a", "b"]) == [b"a", b"b"]


def test_kernels_unused_for_a_month_are_removed(tmp_path: Path) -> None:
    current = make(tmp_path, named("avx2", "a"), 100)
    old, young = make(tmp_path, named("avx-vnni", "b"), 31), make(tmp_path, named("avx-vnni", "c"), 29)
    assert remove_unused(tmp_path, current) == [old]
    assert sorted(tmp_path.iterdir()) == sorted([current, young])


def test_superseded_kernels_are_removed_after_a_week(tmp_path: Path) -> None:
    current = make(tmp_path, named("avx2", "a"), 0)
    old, young = make(tmp_path, named("avx2", "b"), 8), make(tmp_path, named("avx2", "c"), 6)
    assert remove_unused(tmp_path, current) == [old]
    assert young.exists()


def test_other_folders_are_not_removed(tmp_path: Path) -> None:
    current = make(tmp_path, named("avx2", "a"), 0)
    models = make(tmp_path, "random-models", 400)
    (tmp_path / "measured.json").write_text("{}")
    os.utime(tmp_path / "measured.json", (1, 1))
    assert remove_unused(tmp_path, current) == []
    assert models.exists()
    assert (tmp_path / "measured.json").exists()


def test_files_of_killed_programs_are_removed_after_a_day(tmp_path: Path) -> None:
    current = make(tmp_path, named("avx2", "a"), 0)
    left = [make(tmp_path, ".building-1", 2), make(tmp_path, ".removing-1", 2)]
    at_work = make(tmp_path, ".building-2", 0.5)
    remove_unused(tmp_path, current)
    assert not any(path.exists() for path in left)
    assert at_work.exists()


def test_several_programs_may_clear_at_once(tmp_path: Path) -> None:
    current = make(tmp_path, named("avx2", "a"), 0)
    for index in range(40):
        make(tmp_path, f"x86_64-avx2-{index:016x}", 60)
    removed: list[Path] = []
    threads = [
        threading.Thread(target=lambda: removed.extend(remove_unused(tmp_path, current))) for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(removed)) == 40
    # Programs of Windows that open a folder at once may all rename it.
    assert len(removed) == 40 or os.name == "nt"
    assert list(tmp_path.iterdir()) == [current]


def test_use_is_recorded_per_day(tmp_path: Path) -> None:
    folder = make(tmp_path, named("avx2", "a"), 20)
    mark_used(folder)
    assert time.time() - folders_below(tmp_path)[0].used < 60
    before = folder.stat().st_mtime_ns
    mark_used(folder)
    assert folder.stat().st_mtime_ns == before
    mark_used(tmp_path / "not built yet")


def test_folders_are_listed_with_units_and_sizes(tmp_path: Path) -> None:
    make(tmp_path, named("avx2", "a"), 3)
    make(tmp_path, named("avx512-vnni", "b"), 1)
    result = folders_below(tmp_path)
    assert [folder.target for folder in result] == ["x86_64-avx512-vnni", "x86_64-avx2"]
    assert [(folder.units, folder.nbytes) for folder in result] == [(["blocks"], 4)] * 2
    assert folders_below(tmp_path / "nowhere") == []


def test_a_model_needs_the_rows_of_its_formats_and_experts_if_it_has_any(tmp_path: Path) -> None:
    def units(name: str) -> list[str]:
        path = replace(ZOO[name], formats=("Q8_0", "Q4_0")).write(tmp_path / f"{name}.gguf")
        with GGUFFile.open(path) as file:
            weights = read_weights(file, read_config(file))
            return kernel_units(weights)

    assert units("llama") == ["rows_Q4_0", "rows_Q8_0"]
    assert [name for name in units("olmoe") if not name.startswith("rows_")] == ["experts"]
    assert sparse_units(["Q8_0"]) == ["sparse", "neurons_Q8_0"]
    assert sparse_units([]) == []


def test_compile_units_are_balanced_over_processes() -> None:
    rows = [f"rows_{index}" for index in range(10)]
    assert build_groups(["blocks"], 4) == [["blocks"]]
    assert build_groups(["blocks", *rows[:2]], 2) == [["blocks"], rows[:2]]
    assert build_groups([*rows[:2], "blocks"], 8) == [["blocks"], rows[:1], rows[1:2]]
    many = build_groups([*rows, "blocks"], 2)
    assert [len(group) for group in many] == [4, 7]
    assert many[0][0] == "blocks"
    assert sorted(unit for group in many for unit in group) == ["blocks", *rows]
    small = [f"neurons_{index}" for index in range(10)]
    assert [len(group) for group in build_groups(["rows_Q4_0", *small], 2)] == [4, 7]


def test_a_failed_compiler_is_reported_with_its_last_output(tmp_path: Path) -> None:
    store = KernelCache(tmp_path, choose())
    with pytest.raises(KernelBuildError, match=r"building the \S+ kernels failed: KeyError: 'none'"):
        store.objects(["rows_none"])
    assert not any(path.is_dir() for path in tmp_path.iterdir())


def test_a_build_of_another_program_is_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started, requested = threading.Event(), []

    def compiled(units: list[str], folder: str) -> Iterator[str]:
        requested.extend(units)
        started.set()
        time.sleep(0.2)  # the other process requests the kernels during the build
        for unit in units:
            object_file(folder, unit).write_bytes(unit.encode())
            yield unit

    def build() -> None:
        result.append(KernelCache(tmp_path, choose()).objects(["a"]))

    monkeypatch.setattr(KernelCache, "compile", lambda store, units, folder: compiled(units, folder))
    result: list[list[bytes]] = []
    other = threading.Thread(target=build)
    other.start()
    started.wait()
    build()
    other.join()
    assert result == [[b"a"]] * 2
    assert requested == ["a"]


def test_kernels_are_built_without_file_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.EINVAL, "no locks here")

    def compiled(store: KernelCache, units: list[str], folder: str) -> Iterator[str]:
        object_file(folder, "a").write_bytes(b"code")
        yield "a"

    monkeypatch.setattr("fcntl.flock" if os.name == "posix" else "msvcrt.locking", refuse)
    monkeypatch.setattr(KernelCache, "compile", compiled)
    assert KernelCache(tmp_path, choose()).objects(["a"]) == [b"code"]


@pytest.fixture
def quick_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Building a unit writes where it was built; returns the folder for temporary files."""

    def compiled(store: KernelCache, units: list[str], folder: str) -> Iterator[str]:
        for unit in units:
            object_file(folder, unit).write_bytes(f"{unit} built in {store.root}".encode())
            yield unit

    monkeypatch.setattr(KernelCache, "compile", compiled)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    return temporary


def test_an_unwritable_cache_falls_back_to_a_temporary_folder(tmp_path: Path, quick_builds: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(FileExistsError) as refused:
        (tmp_path / "file").mkdir()
    store = KernelCache(tmp_path / "file" / "cache", choose())
    built = store.objects(["a", "b"])
    root = temporary_root()
    assert root.parent == quick_builds
    assert built == [f"{unit} built in {root}".encode() for unit in "ab"]
    assert store.warning == (
        f"compiled kernels can't be kept: {tmp_path / 'file'}: {refused.value.strerror}; they are in {root} "
        "until the system clears it"
    )
    assert KernelCache(tmp_path / "file" / "cache", choose()).objects(["a"]) == built[:1]  # not built again


def test_without_a_writable_folder_kernels_are_built_for_this_process(
    tmp_path: Path, quick_builds: Path
) -> None:
    (tmp_path / "file").write_text("no folder")
    temporary_root().write_text("no folder either")
    store = KernelCache(tmp_path / "file" / "cache", choose())
    built = store.objects(["a", "b"])
    assert [body.split()[0] for body in built] == [b"a", b"b"]
    assert not Path(built[0].decode().rpartition(" ")[2]).exists()
    assert store.warning is not None
    assert store.warning.endswith("; they are compiled again at every start")


@NEEDS_MODES
def test_a_folder_that_others_can_write_is_not_used(tmp_path: Path, quick_builds: Path) -> None:
    root = tmp_path / "cache"
    KernelCache(root, choose()).objects(["a"])
    assert root.stat().st_mode & 0o777 == 0o700
    for path, mode in ((root, 0o777), (objects_folder(root, choose()), 0o770)):
        before = path.stat().st_mode & 0o777
        path.chmod(mode)
        store = KernelCache(root, choose())
        assert store.find("a") is None
        assert store.objects(["a"]) == [f"a built in {temporary_root()}".encode()]
        assert store.warning is not None
        assert f"{path} is writable by other users (mode {mode:o}, wanted 700)" in store.warning
        path.chmod(before)
    assert KernelCache(root, choose()).find("a") is not None


@NEEDS_MODES
def test_an_object_that_others_can_write_is_built_again(tmp_path: Path, quick_builds: Path) -> None:
    store = KernelCache(tmp_path / "cache", choose())
    store.objects(["a"])
    path = store.folder / "a.o"
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o666)
    assert store.find("a") is None
    assert store.objects(["a"])
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files away")
def test_objects_of_another_user_are_not_loaded(tmp_path: Path, quick_builds: Path) -> None:
    store = KernelCache(tmp_path / "cache", choose())
    store.objects(["a"])
    for path in (store.folder / "a.o", store.folder, store.root):
        os.chown(path, 12345, -1)
        assert store.find("a") is None
        assert "belongs to user 12345, not 0" in (distrust_reason(path) or "")
        os.chown(path, 0, -1)
    link = tmp_path / "link"
    link.symlink_to(store.root)
    assert KernelCache(link, choose()).find("a") is not None
    os.lchown(link, 12345, -1)
    assert KernelCache(link, choose()).find("a") is None
    assert distrust_reason(link) == "is a symbolic link of user 12345"


@NEEDS_MODES
def test_a_symbolic_link_as_lock_does_not_change_its_target(tmp_path: Path, quick_builds: Path) -> None:
    root, target = tmp_path / "cache", tmp_path / "precious"
    root.mkdir(mode=0o700)
    target.write_text("mine")
    (root / f"{platform.machine()}-{choose().name}.lock").symlink_to(target)
    store = KernelCache(root, choose())
    assert store.objects(["a"]) == [f"a built in {temporary_root()}".encode()]
    assert target.read_text() == "mine"
