"""Which hardware target a tensor lives on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_PPU_ARCHS = {"ZW-M890P": "zwm890p"}


@dataclass(frozen=True)
class DeviceTarget:
    """A vendor and an architecture as ``src/<vendor>/<operator>/<arch>`` names them.

    A device that is no known GPU has the vendor ``unknown`` and its device type or product name as the architecture.
    """

    vendor: str
    arch: str

    def __str__(self) -> str:
        return f"{self.vendor}/{self.arch}"


_targets: dict[torch.device, DeviceTarget] = {}


def device_target(device: torch.device) -> DeviceTarget:
    """The target of ``device``, cached per device index. Only a GPU is asked for its properties."""
    target = _targets.get(device)
    if target is None:
        target = _targets[device] = _detect(device)
    return target


def _detect(device: torch.device) -> DeviceTarget:
    if device.type != "cuda":
        return DeviceTarget("unknown", device.type)
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return DeviceTarget("amd", properties.gcnArchName.split(":")[0])
    name = properties.name
    if name in _PPU_ARCHS:  # before NVIDIA: this device sits behind a CUDA build and reports capability 8.9
        return DeviceTarget("ppu", _PPU_ARCHS[name])
    if torch.version.cuda is not None and name.startswith("NVIDIA"):
        return DeviceTarget("nvidia", f"sm{properties.major}{properties.minor}")
    return DeviceTarget("unknown", name)
