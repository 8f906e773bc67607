"""Times of our engine on a shape with random weights, part by part: see `engine_parts.py`."""

import sys

from engine_parts import Bench
from parts import run_parts
from shapes import read_engine_job

JOB = read_engine_job(sys.argv[1])
run_parts(JOB.parts, Bench(JOB).parts())
