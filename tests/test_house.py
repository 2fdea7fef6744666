"""Package structure: five packages in five layers, imports go down only, third-party packages per layer."""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("quant_formats", "kernels", "offload", "edgeinfer", "tui", "benchmarks", "tests")
MAX_FILES = 14
"""Python files of a folder; `__init__.py` and `conftest.py` are not counted."""
PUBLIC_UNDERSCORES = {"_exit", "_fields", "_replace"}
"""Of `os` and of named tuples."""
PRIVATE_IN_TESTS = {
    "tests/edgeinfer/encoders/make_encoder_goldens.py": "batches of llama_cpp",
    **{
        f"tests/kernels/cuda/interpreted/{name}.py": "Triton's interpreter, made faster"
        for name in ("fast_values", "memory", "program_arrays", "program_reductions", "programs")
    },
    "tests/kernels/cuda/interpreted_types.py": "Triton's interpreter, made faster",
    "tests/kernels/cuda/interpreter.py": "Triton's interpreter, made faster",
    "tests/kernels/cuda/test_on_a_gpu.py": "Triton's compiler",
    "tests/quant_formats/mix_models.py": "the logger of llama_cpp",
}
"""Files of tests that use private names, and whose."""

PLATFORM_NAMES = {"sys.platform", "os.name", "os.sched_getaffinity", "os.geteuid", "ctypes.windll"}
PLATFORM_MODULES = {"fcntl", "msvcrt", "resource", "winreg", "pty", "termios"}
PLATFORM_FILES = {"user_folders.py", "found_models.py", "peak_memory.py", "compile_child.py"}
"""Outside of the `system` folders: paths of all systems, psutil, and a program that imports nothing else."""

PRIVATE = re.compile(r"(?<!\bself)(?<!\bcls)\._|attr\(|^\s+_\w+\b[^=:]*,$|import .*\b_[a-z]", re.MULTILINE)
"""Text without a match has no private names of others."""
MAX_KERNEL_PARAMETERS, MAX_KERNEL_LINES = 16, 80

# package -> (layer, folder, third-party packages that it may import)
PARTS: dict[str, tuple[int, str, set[str]]] = {
    "edgeinfer_tui": (
        5,
        "tui/edgeinfer_tui",
        {"typer", "click", "rich", "textual", "markdown_it", "uvicorn"},
    ),
    "edgeinfer": (
        4,
        "edgeinfer",
        {"numpy", "jinja2", "tokenizers", "huggingface_hub", "llama_cpp", "llguidance"}
        | {"starlette", "prometheus_client", "mcp", "httpx2", "ray"},
    ),
    "edgeinfer_offload": (3, "offload/edgeinfer_offload", {"numpy", "psutil"}),
    "edgeinfer_kernels": (
        2,
        "kernels/edgeinfer_kernels",
        {"numpy", "numba", "llvmlite", "torch", "triton"},
    ),
    "edgeinfer_quant_formats": (1, "quant_formats/edgeinfer_quant_formats", {"numpy"}),
}


def modules_of(package: str) -> list[Path]:
    return sorted((ROOT / PARTS[package][1]).rglob("*.py"))


def statements(tree: ast.Module) -> Iterator[ast.AST]:
    """Every statement of a module, and what has statements."""
    left: list[ast.AST] = [tree]
    while left:
        node = left.pop()
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            inner = getattr(node, name, ())
            if isinstance(inner, list):  # not those of a lambda or of `a if b else c`
                yield from inner
                left += inner


@cache
def summary(path: Path) -> tuple[frozenset[str], bool]:
    """The packages that a file imports, and whether it has a docstring; read once for all tests."""
    tree, names = ast.parse(path.read_text(encoding="utf-8")), set[str]()
    for node in statements(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return frozenset(names), bool(ast.get_docstring(tree))


def imported_packages(path: Path) -> frozenset[str]:
    return summary(path)[0]


@pytest.mark.parametrize("package", PARTS)
def test_imports_go_down_only(package: str) -> None:
    layer = PARTS[package][0]
    upward = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in modules_of(package)
        for name in imported_packages(path) & PARTS.keys()
        if PARTS[name][0] > layer
    ]
    assert upward == []


@pytest.mark.parametrize("package", PARTS)
def test_a_package_imports_only_allowed_third_party_packages(package: str) -> None:
    allowed = PARTS[package][2] | PARTS.keys() | set(sys.stdlib_module_names)
    foreign = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in modules_of(package)
        for name in sorted(imported_packages(path) - allowed)
    ]
    assert foreign == []


def test_llama_cpp_is_imported_in_one_file_only() -> None:
    importers = [path.name for path in modules_of("edgeinfer") if "llama_cpp" in imported_packages(path)]
    assert len(importers) <= 1, importers


def test_ray_is_imported_in_one_folder_only() -> None:
    folders = {path.parent.name for path in modules_of("edgeinfer") if "ray" in imported_packages(path)}
    assert folders <= {"cluster"}


@pytest.mark.parametrize("package", PARTS)
def test_every_module_has_a_docstring(package: str) -> None:
    silent = [str(path.relative_to(ROOT)) for path in modules_of(package) if not summary(path)[1]]
    assert silent == []


def triton_kernels(path: Path) -> list[ast.FunctionDef]:
    """The functions of a file that Triton compiles."""
    text = path.read_text("utf-8")
    tree = ast.parse(text if "triton.jit" in text else "")
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return [
        node for node in functions if any("triton.jit" in ast.unparse(each) for each in node.decorator_list)
    ]


def test_triton_kernels_have_at_most_sixteen_parameters_and_eighty_lines() -> None:
    kernels = [(path, node) for path in modules_of("edgeinfer_kernels") for node in triton_kernels(path)]
    assert len(kernels) > 100
    large = [
        f"{path.name}: {node.name} has {count} parameters, {lines} lines"
        for path, node in kernels
        for count in [len(node.args.args) + len(node.args.kwonlyargs)]
        for lines in [(node.end_lineno or 0) - node.lineno + 1]
        if count > MAX_KERNEL_PARAMETERS or lines > MAX_KERNEL_LINES
    ]
    assert large == []


def platform_calls(path: Path) -> set[str]:
    """Names in a file that exist on some operating systems only, or that tell which one this is."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text if any(name in text for name in PLATFORM_NAMES) else "")
    attributes = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return attributes & PLATFORM_NAMES | imported_packages(path) & PLATFORM_MODULES


def test_platform_calls_are_in_the_system_folders() -> None:
    outside = [
        f"{path.relative_to(ROOT)}: {', '.join(sorted(names))}"
        for package in PARTS
        for path in modules_of(package)
        if path.parent.name != "system" and path.name not in PLATFORM_FILES
        for names in [platform_calls(path)]
        if names
    ]
    assert outside == []


def test_importing_edgeinfer_loads_no_heavy_package() -> None:
    heavy = [
        "torch",
        "triton",
        "textual",
        "llama_cpp",
        "llguidance",
        "ray",
        "huggingface_hub",
        "numba",
        "edgeinfer.quantizing",
    ]
    code = f"import sys, edgeinfer\nprint([name for name in {heavy!r} if name in sys.modules])\n"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_a_folder_has_at_most_fourteen_files() -> None:
    files = Counter(path.parent for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    excluded = Counter(
        path.parent
        for folder in FOLDERS
        for name in ("__init__.py", "conftest.py")
        for path in (ROOT / folder).rglob(name)
    )
    counts = {str(folder.relative_to(ROOT)): count for folder, count in (files - excluded).items()}
    assert {folder: count for folder, count in counts.items() if count > MAX_FILES} == {}


def private_names(path: Path) -> list[str]:
    """Private names of other modules and objects that a file uses."""
    text, result = path.read_text(encoding="utf-8"), []
    if not PRIVATE.search(text):
        return []
    for node in ast.walk(ast.parse(text)):
        names: list[object] = []
        if isinstance(node, ast.Attribute):
            if node.attr.startswith("_") and ast.unparse(node.value) not in ("self", "cls"):
                names = [node.attr]
        elif isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("setattr", "delattr"):
            names = [each.value for each in node.args[1:2] if isinstance(each, ast.Constant)]
        result += [
            f"line {node.lineno}: {name}"  # type: ignore[attr-defined]
            for name in names
            if str(name).startswith("_") and not str(name).startswith("__") and name not in PUBLIC_UNDERSCORES
        ]
    return result


def test_tests_use_public_names() -> None:
    result = {
        path.relative_to(ROOT).as_posix(): names
        for path in (ROOT / "tests").rglob("*.py")
        if (names := private_names(path))
    }
    assert {path: names for path, names in result.items() if path not in PRIVATE_IN_TESTS} == {}
    assert result.keys() == PRIVATE_IN_TESTS.keys()
