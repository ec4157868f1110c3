"""Write the shipped profiles of named GPUs, from published figures (``papers/roofline.py``).

    python benchmark/plan/published_profiles.py python/canopy_lab/sim/system/profiles

They are not measurements, and each states that. Measure your own with ``canopy profile``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from canopy_lab.sim.model import PRESETS

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "papers"))
from roofline import Device, roofline_profile

DATE = "2026-11-21"
DEVICES = {
    "a100": Device(
        "NVIDIA A100 SXM 80 GB", 312e12, 2.039e12, 32e9,
        ("NVIDIA A100 datasheet: 312 TFLOPS BF16 dense, 2,039 GB/s, PCIe 4.0 x16",),
    ),
    "h100": Device(
        "NVIDIA H100 SXM 80 GB", 989e12, 3.35e12, 64e9,
        ("NVIDIA H100 datasheet: 989 TFLOPS BF16 dense, 3.35 TB/s, PCIe 5.0 x16",),
    ),
    "h20": Device(
        "NVIDIA H20 96 GB", 148e12, 4.0e12, 64e9,
        ("published H20 figures: 148 TFLOPS BF16 dense, 4.0 TB/s, PCIe 5.0 x16",),
    ),
}  # fmt: skip
MODELS = {
    "llama-3.1-8b": (8.03e9, "Llama 3.1 8B model card: 8.03 B parameters, config.json"),
    "qwen2.5-7b": (7.62e9, "Qwen2.5 7B model card: 7.62 B parameters, config.json"),
}


def main(folder: Path) -> None:
    """One file a model and device."""
    for model, (parameters, source) in MODELS.items():
        for device_key, device in DEVICES.items():
            name = f"{model}-{device_key}"
            profile = roofline_profile(
                name, model, PRESETS[model], parameters * 2, device, DATE, sources=(source,)
            )
            path = folder / f"{name}.json"
            path.write_text(json.dumps(profile.to_json(), indent=1) + "\n", encoding="utf-8")
            print(f"{path}: prefill of 1,024 tokens {profile.prefill_s(1024) * 1000:.0f} ms, "
                  f"decode step of 32 x 2,048 {profile.decode_s(32, 2048) * 1000:.1f} ms")  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]))
