"""`study configs DIR [NAME ...]`: write the Accelerate files of strategies for use with any script."""

from __future__ import annotations

import argparse
from pathlib import Path

from study.advisor.advise_command import strategy_texts, write_texts
from study.config.strategies import STRATEGY_NAMES, read_strategy
from study.host.folders import folder_argument

EPILOG = """\
A file refers to its DeepSpeed JSON by its full path, so it can be launched from any folder:
accelerate launch --config_file DIR/zero3.yaml YOUR_PROGRAM.py, or -m study.train.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=folder_argument, metavar="DIR", help="the folder to write; created if missing")
    parser.add_argument("names", nargs="*", default=(), metavar="NAME", help="strategies; default: all")


def run(options: argparse.Namespace) -> int:
    """Write the files and print their paths; return the exit status."""
    folder, texts = options.folder.absolute(), dict[Path, str]()
    for name in options.names or STRATEGY_NAMES:
        texts |= strategy_texts(name, folder / f"{name}.yaml", read_strategy(name).deepspeed)
    write_texts(texts, folder, "DIR")
    print("\n".join(map(str, texts)))
    return 0
