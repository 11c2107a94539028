"""Draw the initial weights of a run that comes later: `python -m study.models.draw`, with the flags of study/train.py.

For models of gigabytes this takes minutes, which `study weights SUITE` spends before a sweep's time is counted.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from study.errors import Unsupported, UserError
from study.host.folders import cache_directory
from study.host.imports import import_libraries
from study.spec.config import parse_command_line, resolved
from study.spec.strategies import read_strategy


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 the weights are there, 1 this box cannot hold them, 2 the request itself is wrong."""
    try:
        config = resolved(parse_command_line(arguments), accelerator_visible=False)
        import_libraries(read_strategy("single"))
        from study.models.initial import materialize_initial_weights

        started = time.monotonic()
        initial = materialize_initial_weights(config, cache_directory())
    except UserError as refusal:
        print(f"error: {refusal.problem}. To fix it: {refusal.fix}.", file=sys.stderr)
        return 1 if isinstance(refusal, Unsupported) else 2
    size = sum(file.stat().st_size for file in initial.path.glob("*.safetensors"))
    took = time.monotonic() - started
    print(f"{config.model_name_or_path}, seed {config.seed}: {size / 1e9:.2f} GB in {took:.0f} s, {initial.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
