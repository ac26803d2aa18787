"""Accelerators: published peaks, the names that files give them, and peaks of one's own."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from optsched.problem.errors import InputError, unknown
from optsched.problem.specs import Parameter, convert_all, read_pairs
from optsched.problem.text_files import read_toml


@dataclass(frozen=True)
class Device:
    """Published peaks of an accelerator.

    Memory and links (both directions) have 1e9 bytes/s, dense 16-bit arithmetic 1e12 operations/s.
    """

    name: str
    bandwidth_gb_s: float
    tflops: float
    memory_gib: float
    link_gb_s: float

    def least_ms(self, flops: float, memory_bytes: float) -> float:
        """Return the minimum time for some arithmetic and memory traffic, by the roofline."""
        return max(flops / self.tflops / 1e9, memory_bytes / self.bandwidth_gb_s / 1e6)


_DATA = read_toml(Path(__file__).with_name("devices.toml"), "peaks of devices")
DEVICES = {name: Device(name, **peaks) for name, peaks in _DATA.items()}
"""Known devices by name."""

_WORDS = (
    "nvidia amd intel r tm geforce instinct tesla radeon gpu tensor core accelerator graphics grid "
    "dgx hgx hopper ampere blackwell lovelace server workstation edition generation oam vf a100d"
)
# Words of a maker's name that tell no device from another.
_IDLE = frozenset(_WORDS.split())
# How a chip is mounted, and how much memory of which kind a card has.
_FORM = re.compile(r"(sxm\d?|pcie\d?|nvl\d*|hbm\d\w?)")
_MEMORY = re.compile(r"(?<![a-z0-9])(\d+) ?g(?:i?b)?(?![a-z0-9])")
# Relative difference up to which two sizes of memory are the same: 141 GB are sold as 144.
_SAME_MEMORY = 0.08
_LARGE_GIB = 70
_NEEDED = ("memory_gb", "bandwidth_gb_s", "bf16_tflops")
OWN = {
    "memory_gb": "memory_gib",
    "bandwidth_gb_s": "bandwidth_gb_s",
    "bf16_tflops": "tflops",
    "link_gb_s": "link_gb_s",
}
"""What a device of one's own is given by, and the field of `Device` that it becomes."""
PCIE_GB_S = 64.0
"""The link of a device of one's own that names none: PCIe 4.0 x16, both directions."""


def _parts(name: str) -> tuple[str, str, float | None]:
    """Return the chip of a device's name, its form and its GB of memory, as far as it has them.

    ``NVIDIA H100 80GB HBM3`` is the chip h100 of the form sxm, with 80 GB.
    """
    text = re.sub("[^a-z0-9]+", " ", name.lower())
    sizes = _MEMORY.findall(text)
    marks = _FORM.findall(text)
    text = _FORM.sub(" ", _MEMORY.sub(" ", text))
    chip = "".join(word for word in text.split() if word not in _IDLE).removeprefix("rtx")
    forms = [mark.rstrip("0123456789") for mark in marks if not mark.startswith("hbm")]
    if not forms and "hbm3" in marks:  # of the H100 cards only SXM has plain HBM3 in its name
        forms = ["sxm"]

    return chip, forms[0] if forms else "", float(sizes[0]) if sizes else None


def devices_named(name: str) -> list[Device]:
    """Return the known devices that a name may mean, as in ``NVIDIA H100 80GB HBM3``.

    A word that is not known makes it another device: an ``RTX 4090 Laptop GPU`` is no ``rtx4090``.
    """
    if name in DEVICES:
        return [DEVICES[name]]

    # The form decides where several are known, of which SXM is the one without a form in its name.
    chip, form, memory = _parts(name)
    forms = {d: _parts(key)[1] for key, d in DEVICES.items() if _parts(key)[0] == chip}
    wanted = {*forms.values()}
    if form in ("sxm", "pcie", "nvl") and len(wanted) > 1:
        wanted = {"" if form == "sxm" else form}

    devices = [d for d in forms if forms[d] in wanted]
    if memory is not None:
        devices = [d for d in devices if abs(memory - d.memory_gib) <= _SAME_MEMORY * d.memory_gib]

    return sorted(devices, key=forms.__getitem__)


def device(name: str) -> Device:
    """Return a known device, or one of one's own.

    `name`: a name of `DEVICES`, or any other by which `devices_named` knows a device. An H100 or
    H200 of no named form is SXM. Or peaks, ``memory_gb=48,bandwidth_gb_s=864,bf16_tflops=362``,
    with ``name`` and ``link_gb_s`` if wanted, or a file ``.toml`` with these keys.
    """
    if "=" in name:
        return own_device(read_pairs(name.split(","), f"device {name!r}"), f"device {name!r}")
    if name.endswith(".toml"):
        data = read_toml(name, "the peaks of a device in TOML")
        texts = {"name": Path(name).stem, **{key: str(value) for key, value in data.items()}}
        return own_device(texts, name)

    # Of several, those without a form in their names are meant: SXM, where other forms are known.
    possible = devices_named(name)
    usual = [d for d in possible if not _parts(d.name)[1]] or possible
    if len(usual) > 1:
        names = " or ".join(d.name for d in usual)
        raise InputError(f"device: found {name!r}, which may be several; expected {names}")

    if not usual:
        raise InputError(
            f"{unknown('device:', name, DEVICES)}; or give your own as "
            "memory_gb=48,bandwidth_gb_s=864,bf16_tflops=362, or as a .toml file of these"
        )

    return usual[0]


def own_device(texts: Mapping[str, str], where: str) -> Device:
    """Return a device from the texts of its peaks."""
    # A `Parameter` is its type, whether it may be None, and its default. A key with a default may
    # be left out, and then `convert_all` returns no value for it.
    known = {"name": Parameter(str, False, "own"), **dict.fromkeys(OWN, Parameter(float, False, 0))}
    values = convert_all(texts, known, where)
    name = values.pop("name", "own")
    peaks: dict[str, float] = {}
    for key, value in values.items():
        if not 1e-6 <= value <= 1e12:
            found = f"{where}: {key}: found {value!r}"
            raise InputError(f"{found}; expected a number from 1e-06 to 1e+12")

        peaks[OWN[key]] = value

    for key in _NEEDED:
        if OWN[key] not in peaks:
            raise InputError(f"{where}: {key}: found nothing; expected a number > 0")

    return Device(name, **{"link_gb_s": PCIE_GB_S, **peaks})


def served_by_vllm(device: Device, version: str | None = None) -> tuple[int, int]:
    """Return the seats and the tokens of a batch that a server of vLLM takes on a device.

    These are its defaults for ``--max-num-seqs`` and ``--max-num-batched-tokens``.
    It goes by the memory, and an A100 counts as small whatever it has. In 0.8 an H100 and an H200
    were large already, and others changed (its pull requests 16158 and 17073). Without a version
    it is a current one.
    """
    large = device.memory_gib >= _LARGE_GIB and not device.name.startswith("a100")
    known_in_0_8 = device.name.startswith(("h100", "h200")) and _number(version) == (0, 8)
    if version is not None and _number(version) < (0, 9) and not known_in_0_8:
        raise InputError(
            f"vllm_version: found {version} on {device.name}, whose defaults are not known; "
            "expected 0.9 or later, or 0.8 on an H100 or H200, or --max-num-seqs and "
            "--max-num-batched-tokens"
        )

    return (1024, 8192) if large else (256, 2048)


def admitted_whole_by_vllm(version: str | None) -> bool | None:
    """Return whether vLLM admits a prompt when all of it fits, and not its first chunk.

    Its pull request 37307 came between 0.17 and 0.19. None: it is not known.
    """
    number = _number(version)
    if number < (0, 8) or number == (0, 18):
        return None

    return number > (0, 18)


def _number(version: str | None) -> tuple[int, int]:
    """Return the first two numbers of a version; (0, 0) if it has none."""
    parts = re.match(r"v?(\d+)\.(\d+)", version or "")
    return (int(parts[1]), int(parts[2])) if parts else (0, 0)
