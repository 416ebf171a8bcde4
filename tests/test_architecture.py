"""The import table of the design, the size of files and functions, and what `flashdraft --help` may load."""

from __future__ import annotations

import ast
import graphlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 80

# unit -> the units it may import. Every unit may import itself and `errors`.
TABLE: dict[str, set[str]] = {
    "errors": set(),
    "kernels": set(),
    "client": set(),
    "draft": {"kernels"},
    "targets": {"kernels"},
    "quant": {"kernels"},
    "checkpoint": {"draft", "quant"},
    "engine": {"kernels", "draft", "quant", "targets"},
    "llm": {"engine", "targets", "checkpoint"},
    "inspection": {"checkpoint", "draft", "quant", "targets", "engine"},
    "compare": {"llm", "engine"},
    "terminal": {"llm", "engine", "compare", "inspection", "client"},
    "train": {"kernels", "draft", "quant", "targets", "checkpoint", "client", "engine", "llm"},
    "publish": {"checkpoint"},
    "handover": {"checkpoint", "draft", "inspection", "llm"},
    "eval": {"client", "llm", "train"},  # of these only what needs no torch: prompts, files, hub
    "server": {"llm", "engine"},
}
TABLE["card"] = {"checkpoint", "draft", "quant", "inspection", "eval", "llm", "train"}
TABLE["quantize"] = {*TABLE} - {"server", "eval", "compare", "terminal", "inspection"}
TABLE["fit"] = TABLE["doctor"] = {*TABLE, "fit", "doctor"} - {"server"}
TABLE["cli"] = {*TABLE}
# Modules that count as part of another unit.
PART_OF = {
    "text": "llm",
    "template": "llm",
    "thinking": "llm",
    "grammar": "llm",
    "media": "llm",
    "belonging": "llm",
    "builtin": "llm",
    "prompts": "llm",
    "speculators": "checkpoint",
    "config_json": "checkpoint",
    "model_files": "checkpoint",
    "quantized": "checkpoint",
    "inspection_display": "inspection",
    "__main__": "cli",
    "cli_bench": "cli",
    "cli_card": "cli",
    "cli_compare": "cli",
    "cli_eval": "cli",
    "cli_doctor": "cli",
    "cli_fit": "cli",
    "cli_options": "cli",
    "cli_quantize": "cli",
    "cli_serve": "cli",
    "cli_synthesize": "cli",
}

OPTIONAL_PACKAGES = {
    "accelerate",
    "datasets",
    "fastapi",
    "gguf",
    "httpx",
    "huggingface_hub",
    "llguidance",
    "matplotlib",
    "PIL",
    "prometheus_client",
    "pyarrow",
    "pydantic",
    "soundfile",
    "starlette",
    "tensorboard",
    "tiktoken",
    "triton",
    "uvicorn",
}


class Import(NamedTuple):
    module: str  # dotted; a name imported from a package of ours is its submodule where there is one
    line: int
    in_function: bool
    typing_only: bool


def modules_of(root: Path) -> dict[str, Path]:
    """Dotted names of all modules under root/flashdraft."""
    names = {}
    for path in sorted((root / "flashdraft").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def imports_of(module: str, modules: dict[str, Path]) -> Iterator[Import]:
    path = modules[module]
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]

    def walk(node: ast.AST, in_function: bool, typing_only: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(alias.name, child.lineno, in_function, typing_only)
            elif isinstance(child, ast.ImportFrom):
                base = package[: len(package) - child.level + 1] if child.level else []
                source = ".".join([*base, *([child.module] if child.module else [])])
                for alias in child.names:
                    name = f"{source}.{alias.name}"
                    name = name if name in modules or source == "flashdraft" else source
                    yield Import(name, child.lineno, in_function, typing_only)
            else:
                function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                # An else branch of `if TYPE_CHECKING` would be misread; none is needed.
                checking = isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING")
                yield from walk(child, in_function or function, typing_only or checking)

    yield from walk(ast.parse(path.read_text(encoding="utf-8")), False, False)


def unit_of(module: str) -> str:
    head = module.split(".")[1]
    return PART_OF.get(head, head)


def import_violations(root: Path) -> list[str]:
    modules = modules_of(root)
    found = []
    for module, path in modules.items():
        if module == "flashdraft":  # the lazy public names; tests/test_public_api.py holds them
            continue
        unit, where = unit_of(module), path.relative_to(root)
        if unit not in TABLE:
            found.append(f"{where}: {unit} is not a unit of the import table")
            continue
        for item in imports_of(module, modules):
            top = item.module.split(".")[0]
            # kernels/*_triton.py are written in an optional package, so importing one is importing that package.
            optional = top in OPTIONAL_PACKAGES or item.module.endswith("_triton")
            if item.in_function and unit != "cli" and not optional:
                found.append(f"{where}:{item.line}: imports {item.module} inside a function")
            if top != "flashdraft" or item.module == "flashdraft.__version__":
                continue
            if item.module not in modules or item.module == "flashdraft":
                found.append(f"{where}:{item.line}: imports {item.module}, which is not a module of ours")
            elif unit_of(item.module) not in {unit, "errors", *TABLE[unit]}:
                found.append(f"{where}:{item.line}: {unit} may not import {unit_of(item.module)}")
    return found


def import_cycle(root: Path) -> list[str]:
    """One cycle of imports between our modules, or []. Imports for type checkers only do not run, so they do not count."""
    modules = modules_of(root)
    graph = {
        name: {item.module for item in imports_of(name, modules) if item.module in modules and not item.typing_only} - {name}
        for name in modules
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def size_violations(root: Path) -> list[str]:
    found = []
    for path in sorted(p for d in ("flashdraft", "tests", "benchmarks", "tools") for p in (root / d).rglob("*.py")):
        source, where = path.read_text(encoding="utf-8"), path.relative_to(root)
        lines = source.count("\n")
        if lines > MAX_FILE_LINES:
            found.append(f"{where}: {lines} lines, at most {MAX_FILE_LINES}")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    found.append(f"{where}:{node.lineno}: {node.name} has {lines} lines, at most {MAX_FUNCTION_LINES}")
    return found


def test_every_import_is_in_the_table_and_at_the_top_of_its_file() -> None:
    assert import_violations(ROOT) == []


def test_imports_form_no_cycle() -> None:
    assert import_cycle(ROOT) == []


def test_files_and_functions_are_short() -> None:
    assert size_violations(ROOT) == []


def run_and_list_modules(*arguments: str) -> tuple[str, set[str]]:
    """Standard output of the command line, and the modules that it has imported by its end."""
    script = (
        f"import atexit, json, sys; sys.argv = ['flashdraft', *{arguments!r}]\n"
        "atexit.register(lambda: print(json.dumps(sorted(sys.modules)), file=sys.stderr))\n"
        "from flashdraft.cli import main; main()"
    )
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout, set(json.loads(run.stderr.splitlines()[-1]))


def test_help_imports_neither_torch_nor_transformers_nor_fastapi() -> None:
    said, modules = run_and_list_modules("--help")
    assert "generate" in said
    assert {"torch", "transformers", "fastapi", "numpy"}.isdisjoint(modules)


def test_a_file_of_facts_is_printed_without_torch() -> None:
    said, modules = run_and_list_modules("card", "builtin", "--facts-template")
    assert 'base_model = "HuggingFaceTB/SmolLM2-135M-Instruct"' in said
    assert {"torch", "transformers"}.isdisjoint(modules)


# The checker itself, on planted trees: it must see what it is for.


def plant(root: Path, files: dict[str, str]) -> Path:
    for name, source in files.items():
        path = root / "flashdraft" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return root


CLEAN = {
    "__init__.py": "from importlib import import_module\n",
    "errors.py": "",
    "draft.py": "from flashdraft.errors import X\n",
    "kernels/__init__.py": "",
    "kernels/loss.py": "def f():\n    import pyarrow.parquet\n    from .loss_triton import g\n",
    "kernels/loss_triton.py": "import triton.language\n",
    "engine/__init__.py": "",
    "engine/cache.py": "import flashdraft.kernels.loss\nfrom . import pages\nfrom ..draft import Y\n",
    "engine/pages.py": "",
    "text.py": "from flashdraft.engine.cache import Z\n",
    "cli.py": "from flashdraft import __version__\ndef f():\n    from flashdraft.text import T\n",
}


def test_the_checker_accepts_a_clean_tree(tmp_path: Path) -> None:
    plant(tmp_path, CLEAN)
    assert (import_violations(tmp_path), import_cycle(tmp_path), size_violations(tmp_path)) == ([], [], [])


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        ("kernels/loss.py", "from flashdraft.draft import A", "flashdraft/kernels/loss.py:1: kernels may not import draft"),
        ("kernels/loss.py", "from .. import draft", "flashdraft/kernels/loss.py:1: kernels may not import draft"),
        ("engine/pages.py", "\nimport flashdraft.text", "flashdraft/engine/pages.py:2: engine may not import llm"),
        ("draft.py", "from .engine import pages as p", "flashdraft/draft.py:1: draft may not import engine"),
        ("draft.py", "try:\n    from flashdraft import cli\nfinally: ...", "flashdraft/draft.py:2: draft may not import cli"),
        (
            "text.py",
            "from flashdraft import LLM",
            "flashdraft/text.py:1: imports flashdraft.LLM, which is not a module of ours",
        ),
        ("text.py", "def f():\n    import json", "flashdraft/text.py:2: imports json inside a function"),
        ("text.py", "class A:\n  async def f():\n    from .draft import B", "flashdraft/text.py:3: imports flashdraft.draft"),
        ("helpers.py", "", "flashdraft/helpers.py: helpers is not a unit of the import table"),
    ],
)
def test_the_checker_finds_a_planted_import(tmp_path: Path, name: str, source: str, message: str) -> None:
    plant(tmp_path, {**CLEAN, name: source})
    assert import_violations(tmp_path)[0].startswith(message)


def test_no_two_test_files_have_one_name() -> None:
    """pytest imports them by their names alone."""
    names = [path.name for path in Path(__file__).parent.rglob("*.py") if path.name != "conftest.py"]
    assert {name for name in names if names.count(name) > 1} == set()


def test_the_checker_finds_a_planted_cycle_but_not_one_of_types_only(tmp_path: Path) -> None:
    plant(tmp_path, {**CLEAN, "engine/pages.py": "if TYPE_CHECKING:\n    from flashdraft.engine.cache import P\n"})
    assert import_cycle(tmp_path) == []
    plant(tmp_path, {"engine/pages.py": "from flashdraft.engine import cache\n"})
    assert set(import_cycle(tmp_path)) == {"flashdraft.engine.cache", "flashdraft.engine.pages"}


def test_the_checker_finds_a_long_file_and_a_long_function(tmp_path: Path) -> None:
    plant(
        tmp_path, {"draft.py": "def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES + "\n" * (MAX_FILE_LINES - MAX_FUNCTION_LINES)}
    )
    assert size_violations(tmp_path) == [
        f"flashdraft/draft.py: {MAX_FILE_LINES + 1} lines, at most {MAX_FILE_LINES}",
        f"flashdraft/draft.py:1: f has {MAX_FUNCTION_LINES + 1} lines, at most {MAX_FUNCTION_LINES}",
    ]
