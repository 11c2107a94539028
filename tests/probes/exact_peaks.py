"""study/train.py, but what is freed goes back to the system at once, as it does for a virtual rank.

So a peak is what a rank held. By default how much of it stays around depends on chance.
"""

from __future__ import annotations

import os

from study.host import environment as devices
from study.run.console import run_for_exit_status
from study.train import main

devices._keep_freed_memory = devices.set_low_mmap_threshold
os._exit(run_for_exit_status(main))
