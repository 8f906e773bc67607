"""Write parallm/model/ARCHITECTURES.md: what ParaLLM does with each model file of mlx-lm, tried with tiny models.

    scripts/build_architecture_table.py            writes the table, about four minutes on a CPU
    scripts/build_architecture_table.py NAME...    shows the rows of some files

Ends with a line of JSON, the figures of the table.
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import tests.conftest  # noqa: E402, F401  # loads the BLAS before MLX
from tests.model.architectures import figures_of, model_files, table_of, trial  # noqa: E402

TABLE = ROOT / "parallm" / "model" / "ARCHITECTURES.md"


def main() -> None:
    chosen = sys.argv[1:]
    rows = {}
    for name in chosen or model_files():
        rows[name] = trial(name)
        sys.stdout.write(f"{rows[name].cells(name)}\n")
        sys.stdout.flush()
    if not chosen:
        TABLE.write_text(table_of(rows))
    sys.stdout.write(f"{json.dumps(figures_of(rows))}\n")


if __name__ == "__main__":
    main()
