"""mlx-lm's server on a port, as `python -m mlx_lm server` starts it; for `with_blas.py`, whose BLAS it takes."""

import json
import sys

from mlx_lm.server import main

ASKED = json.loads(sys.argv[1])
sys.argv = ["mlx_lm.server", "--model", ASKED["model"], "--port", str(ASKED["port"]), "--log-level", "WARNING"]
main()
