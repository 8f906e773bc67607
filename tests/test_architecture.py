"""The rules that keep the tree in order: who imports whom, one list of names, no module without a purpose."""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from parallm.config.schema import RunConfig, ServeConfig, shipped

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "parallm"
MODULES = sorted(PACKAGE.rglob("*.py"))

# From the bottom up. A part imports only from rows below its own, so parts of one row never import each other.
LAYERS: tuple[set[str], ...] = (
    {"conversation"},
    {
        "types",
        "reports",
        "errors",
        "docstrings",
        "settings",
        "seeds",
        "interrupts",
        "json_log",
        "log_files",
        "user_folders",
        "tensors",
        "array_row",
    },
    {"metrics", "device", "client"},
    {"model"},
    {"engine", "learner", "environment", "checkpoint", "registry"},
    {"rollout", "tasks", "jobs"},
    {"trainer", "server"},
    {"integrations", "distributed"},
    {"config"},
    {"run"},
    {"train", "serve", "evaluate", "export", "front", "dashboard", "library", "cli"},
    {"__main__"},
)
LAYER_OF = {part: layer for layer, parts in enumerate(LAYERS) for part in parts}

SHORT = 40
"""Lines below which a module needs two importers or a reason."""
REASONS = {
    "__main__.py": "entry point",
    "train.py": "entry point",
    "serve.py": "entry point",
    "evaluate.py": "entry point",
    "export.py": "entry point",
    "front.py": "entry point",
    "client/hatch_build.py": "builds the wheel of the client",
    "run/front.py": "the wiring of a command",
    "cli/configuration.py": "a command of the program",
    "log_files.py": "a handler with a life of its own",
    "jobs/retries.py": "a clock of its own",
    "device/thread_end.py": "acts as the process ends",
    "integrations/atropos/environment_host.py": "runs in the process of an environment",
    "model/kernels/copy_into.py": "the Python face of a kernel",
    "model/kernels/head_norm.py": "the Python face of a kernel",
    "model/kernels/wait_until.py": "the Python face of a kernel",
    "model/kernels/unit_lower_inverse.py": "the Python face of a kernel",
}

RETIRED = re.compile(r"\b(told|untold|knocks|lessons|house|skinny)\b|\bclass Room\b", re.IGNORECASE)
FRAGMENTS = ("Of ", "That ", "Where ", "By ", "With ")


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_modules(path: Path) -> Iterator[str]:
    """Modules and names of `parallm` that a file imports, dotted."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("parallm."))
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "parallm":
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names if not alias.name.startswith("__"))


def imported_parts(path: Path) -> set[str]:
    return {name.split(".")[1] for name in imported_modules(path) if "." in name}


def test_every_part_has_a_layer() -> None:
    parts = {part_of(path) for path in MODULES} - {"__init__"}
    assert parts == LAYER_OF.keys()


def test_a_module_imports_only_from_layers_below_its_own() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports parallm.{imported}"
        for path in MODULES
        for imported in imported_parts(path)
        if imported != part_of(path) and LAYER_OF[imported] >= LAYER_OF[part_of(path)]
    ]
    assert wrong == []


def test_no_import_hides_from_the_layers_behind_type_checking() -> None:
    assert [path.name for path in MODULES if "TYPE_CHECKING" in path.read_text()] == []


def test_the_table_of_layers_in_the_readme_is_that_of_this_test() -> None:
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \|", (PACKAGE / "README.md").read_text(), re.MULTILINE)
    table = {
        int(layer): {name.strip("/").removesuffix(".py") for name in re.findall("`([^`]+)`", names)}
        for layer, names in rows
    }
    assert table == dict(enumerate(LAYERS))


def test_every_file_in_the_readme_exists() -> None:
    names = set(re.findall(r"`((?:\w+/)*\w+\.py)`", (PACKAGE / "README.md").read_text()))
    assert [name for name in sorted(names) if not ((PACKAGE / name).is_file() or (ROOT / name).is_file())] == []


def test_a_short_module_has_two_importers_or_a_reason() -> None:
    importers = Counter(name for path in MODULES for name in set(imported_modules(path)))
    lonely = [
        name
        for path in MODULES
        if (name := str(path.relative_to(PACKAGE))) not in REASONS
        and path.name not in ("__init__.py", "settings.py")
        and len(path.read_text().splitlines()) < SHORT
        and importers[f"parallm.{name.removesuffix('.py').replace('/', '.')}"] < 2
    ]
    assert lonely == []


def strings(path: Path) -> Iterator[str]:
    """Docstrings of modules, classes, functions and attributes."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value


def test_retired_words_stay_retired() -> None:
    files = [path for path in sorted(PACKAGE.rglob("*")) if path.suffix in (".py", ".pyi", ".md", ".cu", ".yaml")]
    lines = [(path, line) for path in files for line in path.read_text().splitlines()]
    assert [f"{path.relative_to(ROOT)}: {line}" for path, line in lines if RETIRED.search(line)] == []


def test_a_docstring_begins_with_its_subject_or_verb() -> None:
    wrong = [(path, text) for path in MODULES for text in strings(path) if text.startswith(FRAGMENTS)]
    assert [f"{path.relative_to(ROOT)}: {text.splitlines()[0]}" for path, text in wrong] == []


def test_groups_fields_and_parts_have_the_same_names() -> None:
    groups = {path.name for path in shipped("conf").iterdir() if path.is_dir()} - {"deploy"}
    parts = {path.parent.name for path in PACKAGE.glob("*/settings.py")}
    keys = {field.name for kind in (RunConfig, ServeConfig) for field in fields(kind)}
    names = keys - {
        "name",
        "seed",
        "log_level",
        "log_format",
        "log_file",
        "log_max_bytes",
        "idle_exit_seconds",
        "policies",
    }
    assert names == parts
    assert groups <= parts


def test_composing_a_run_loads_no_mlx() -> None:
    commands = "parallm.train, parallm.serve, parallm.evaluate, parallm.export, parallm.front, parallm.dashboard"
    script = f"import sys, {commands}; sys.exit('mlx.core' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
