"""The device that an artefact's kernels run on, or an emulated one to rehearse without a GPU."""

from __future__ import annotations

from pathlib import Path

from ds41_tvm.artifact.load import Artifact, open_artifact, open_device
from ds41_tvm.cpu_features import available_threads
from ds41_tvm.runtime.device import Device, Host
from ds41_tvm.runtime.device_emulated import Emulated


def open_part(folder: Path, artifact: str, emulate: bool) -> tuple[Artifact, Device]:
    """An artefact of the check, without weights, and a device of its own. `emulate`: for kernels of the processor."""
    opened = open_artifact(folder / "artifacts" / artifact, with_weights=False)
    device = open_device(opened.manifest, 0, opened.path)
    if device is not None:
        return opened, device
    return opened, Emulated(available_threads()) if emulate else Host(available_threads())
