"""`study configs DIR [NAME ...]`: write the Accelerate files of strategies for use with any script."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import yaml

from study.advisor.advise_command import write_texts
from study.config.strategies import STRATEGY_DIRECTORY, STRATEGY_NAMES, read_strategy, read_yaml
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
        deepspeed = read_strategy(name).deepspeed
        document = read_yaml(STRATEGY_DIRECTORY / f"{name}.yaml")
        if deepspeed is not None:
            inner = folder / f"{name}.json"
            document["deepspeed_config"]["deepspeed_config_file"] = str(inner)
            texts[inner] = json.dumps(deepspeed, indent=2) + "\n"
        texts[folder / f"{name}.yaml"] = yaml.safe_dump(document, sort_keys=False)
    write_texts(texts, folder, "DIR")
    print("\n".join(map(str, texts)))
    return 0
