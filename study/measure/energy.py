"""Energy of this rank's GPU, from the driver's own counter. No counter, no figure: None."""

from __future__ import annotations

from typing import Any

import torch


def nvml_handle(device: torch.device) -> Any | None:
    """The driver's handle of exactly this GPU, whatever CUDA_VISIBLE_DEVICES hides or reorders; None without one."""
    # The UUID names the card (or the MIG slice) itself; an index would have to be translated.
    return handle_of(str(torch.cuda.get_device_properties(device).uuid)) if device.type == "cuda" else None


def handle_of(uuid: str) -> Any | None:
    import pynvml

    try:
        pynvml.nvmlInit()
        for name in (f"MIG-{uuid}", f"GPU-{uuid}"):
            try:
                handle = pynvml.nvmlDeviceGetHandleByUUID(name)
            except (pynvml.NVMLError_NotFound, pynvml.NVMLError_InvalidArgument):
                continue
            # Where this is the card that a slice is cut from, its figures are not the slice's.
            return None if name.startswith("GPU") and _is_divided(handle) else handle
    except pynvml.NVMLError:
        # No NVML library, no permission: this figure is not measurable here.
        return None
    return None


def _is_divided(handle: Any) -> bool:
    import pynvml

    try:
        return bool(pynvml.nvmlDeviceGetMigMode(handle)[0])
    except pynvml.NVMLError_NotSupported:  # most GPUs cannot be
        return False


class EnergyMeter:
    """Joules between `resume()` and `pause()`, summed over the timed window's segments; None where one is missing."""

    def __init__(self, device: torch.device) -> None:
        self._handle = nvml_handle(device)
        self._started_mj: int | None = None
        self._total_mj: int | None = None

    @property
    def joules(self) -> float | None:
        return None if self._total_mj is None else self._total_mj / 1000

    def resume(self) -> None:
        self._started_mj = self._read_mj()

    def pause(self) -> None:
        now = self._read_mj()
        if now is not None and self._started_mj is not None:
            self._total_mj = (self._total_mj or 0) + now - self._started_mj
        self._started_mj = None

    def _read_mj(self) -> int | None:
        if self._handle is None:
            return None
        import pynvml

        try:
            return int(pynvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))
        except pynvml.NVMLError:
            self._handle = self._total_mj = None
            return None
