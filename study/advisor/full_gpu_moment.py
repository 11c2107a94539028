"""The moment of a failed allocation - the optimizer's step, or a save - from the traceback above torch's message."""

from __future__ import annotations

import dataclasses
import re

# Activations are freed by then: other remedies than those of a forward or backward pass.
STEP = "step"
SAVE = "save"
_FRAME = re.compile(r'\s+File "([^"]+)", line \d+, in (\S+)')
_ERROR_NAME = re.compile(r"[\w.]*Error: ")
# Of torch, bitsandbytes and others.
_OPTIMIZER_FILE = re.compile(r"[/\\]optim(izers?)?[/\\][^/\\]+$")
# DeepSpeed makes the state before the first step, of ZeRO's own partitions.
STATE_FUNCTIONS = {"_init_group", "initialize_optimizer_states", "_create_fp32_partitions"}
SAVING_FUNCTIONS = {
    *("save_model", "save_checkpoint", "_save_checkpoint", "save_16bit_model", "save_state", "save_fsdp_model"),
    *("_zero3_consolidated_16bit_state_dict", "get_state_dict", "get_model_state_dict", "get_optimizer_state_dict"),
    *("_full_pre_state_dict_hook", "_full_post_state_dict_hook", "full_optim_state_dict"),
}
# A step may call forward as its closure (Lightning), which is further inside.
_INNERMOST = 2


@dataclasses.dataclass(frozen=True)
class Frame:
    """One call of a traceback."""

    file: str
    function: str


def find_moment(before: str, line: str) -> str:
    """Return the moment of an error from the text before its line; "" for other moments, or without a traceback."""
    name = _ERROR_NAME.search(line)
    # The rank, which a launcher puts before each line.
    prefix = line[: name.start()] if name else ""
    frames = read_frames(before, prefix)
    if any(frame.function in SAVING_FUNCTIONS for frame in frames):
        return SAVE
    if any(_is_optimizer(frame) for frame in frames[:_INNERMOST]):
        return STEP
    return ""


def read_frames(before: str, prefix: str) -> list[Frame]:
    """Return the frames at the end of a text, the innermost first. Lines of other ranks may be between them."""
    frames = []
    for line in reversed(before.rstrip("\n").split("\n")):
        if not line.startswith(prefix):
            continue
        rest = line[len(prefix) :]
        if not rest[:1].isspace():
            # The traceback's first line, or what another process printed.
            break
        match = _FRAME.match(rest)
        if match:
            frames.append(Frame(match[1], match[2]))
    return frames


def _is_optimizer(frame: Frame) -> bool:
    return frame.function in STATE_FUNCTIONS or bool(_OPTIMIZER_FILE.search(frame.file))
