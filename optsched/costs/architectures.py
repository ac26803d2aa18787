"""Shapes of decoder-only transformers: known ones, and those of a Hugging Face config.json."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optsched.problem.columns import MAX_TOKENS
from optsched.problem.errors import InputError, unknown
from optsched.problem.room import KvWindow
from optsched.problem.text_files import read_object, read_toml

Floats = NDArray[np.float64]
BYTES = 2
"""Bytes of a number in weights and KV, which are 16-bit floats."""


@dataclass(frozen=True)
class Architecture:
    """Shape of a decoder-only transformer with a gated feed-forward network.

    `hidden` and `ffn` are widths (of one expert, where there are `experts`, of which a token takes
    `experts_per_token`), and `head_size` that of a head, 0 for ``hidden / heads``. Of the layers
    `sliding` attend to the last `window` tokens alone, and keep no other KV. `tied`
    says whether the embedding is the output projection, and `notes` what the shape leaves out of
    its model.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    head_size: int = 0
    tied: bool = False
    experts: int = 0
    experts_per_token: int = 0
    sliding: int = 0
    window: int = 0
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.head_size:
            object.__setattr__(self, "head_size", self.hidden // self.heads)

    @property
    def attention_width(self) -> int:
        """Width of the queries of all heads, which need not be that of the hidden state."""
        return self.heads * self.head_size

    @property
    def layer_weights(self) -> dict[str, int]:
        """Number of weights in a layer's matrices, by operator; those of one expert."""
        queries, kv = self.attention_width, self.kv_heads * self.head_size
        return {
            "attn_pre_proj": self.hidden * (queries + 2 * kv),
            "attn_post_proj": self.hidden * queries,
            "mlp_up_proj": 2 * self.hidden * self.ffn,
            "mlp_down_proj": self.hidden * self.ffn,
        }

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights: the layers, the embedding and the output projection."""
        copies = {"mlp_up_proj": max(self.experts, 1), "mlp_down_proj": max(self.experts, 1)}
        layer = sum(copies.get(name, 1) * n for name, n in self.layer_weights.items())
        layer += self.hidden * self.experts  # a matrix chooses the experts
        return BYTES * (self.layers * layer + (2 - self.tied) * self.vocab * self.hidden)

    @property
    def routing(self) -> str:
        """What is assumed of the experts that tokens take."""
        return (
            f"experts: every token takes {self.experts_per_token} of {self.experts}, "
            "independently and all as often; a batch whose tokens choose alike is faster"
        )

    def experts_reached(self, tokens: Floats) -> Floats:
        """Return how many experts of a layer so many tokens take in the mean (`routing`)."""
        missed = (1 - self.experts_per_token / self.experts) ** tokens
        return np.asarray(self.experts * (1 - missed))

    @property
    def layer_kv_bytes(self) -> int:
        """Bytes of the keys and values of one token in one layer."""
        return 2 * BYTES * self.kv_heads * self.head_size

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values of one token in all layers."""
        return self.layers * self.layer_kv_bytes

    @property
    def kv_window(self) -> KvWindow | None:
        """Which layers keep the KV of a window alone; None where all keep everything."""
        return KvWindow(self.window, self.sliding, self.layers) if self.sliding else None

    def check_degree(self, devices: int) -> None:
        """Check that so many devices can share every layer, each with whole heads."""
        if devices < 1 or self.heads % devices:
            raise InputError(
                f"tensor_parallel: found {devices!r}; expected a divisor of {self.name}'s "
                f"{self.heads} heads"
            )

    def kv_bytes_on(self, devices: int, request_tokens: int | None = None) -> float:
        """Return the bytes of a token's keys and values on all devices that share the model.

        With more `devices` than KV heads each holds a whole head, and heads are held several times.
        In a request of so many tokens layers of a window hold that of its last ones; by default
        they are taken to hold all.
        """
        bytes_held = self.kv_bytes * devices // min(devices, self.kv_heads)
        if not self.sliding or request_tokens is None or request_tokens <= self.window:
            return bytes_held

        left_out = self.sliding / self.layers * (1 - self.window / request_tokens)
        return bytes_held * (1 - left_out)


_DATA = read_toml(Path(__file__).with_name("architectures.toml"), "shapes of models")
ARCHITECTURES = {name: Architecture(name, **sizes) for name, sizes in _DATA.items()}
"""Known model architectures by name."""

_CONFIG = read_toml(Path(__file__).with_name("config.toml"), "fields of configurations")


def architecture(name: str) -> Architecture:
    """Return a known model architecture, or that of a configuration.

    Parameters
    ----------
    name : str
        One of `ARCHITECTURES`, or the name on Hugging Face: ``Llama-2-7b-hf`` and ``llama2-7b``
        are the same. Or a model's ``config.json``, or its folder.
    """
    # Names differ in the owner, the maker, a hyphen, a point release and what follows the size.
    plain = name.lower().rpartition("/")[2].replace("meta-", "").replace("llama-", "llama")
    plain = re.sub(r"(-hf|-chat|-instruct|-base|-it|-2507)+$", "", plain)
    plain = re.sub(r"^llama3\.[13]-", "llama3-", plain)
    if plain in ARCHITECTURES:
        return ARCHITECTURES[plain]

    file = Path(name)
    if file.suffix != ".json":
        file = file / "config.json"
        if not file.is_file():
            raise InputError(
                f"{unknown('model:', name, ARCHITECTURES)}; or give a "
                "model's config.json, or its folder"
            )

    config, whole_path = read_config(file), file.resolve()
    reason = not_modelled(config)
    if reason is not None:
        raise InputError(f"{file}: {reason}")

    in_folder = whole_path.name == "config.json"
    return architecture_of(config, whole_path.parent.name if in_folder else whole_path.stem, file)


def read_config(file: Path) -> dict[str, Any]:
    """Return a model's configuration; that of its language model if it also sees or hears."""
    config = read_object(file, "a model's configuration")
    nested = [config[key] for key in _CONFIG["nested"] if isinstance(config.get(key), dict)]
    if not nested:
        return config

    # These fields are beside the language model's.
    of_all = (*_CONFIG["quantized"], "tie_word_embeddings")
    return {key: config[key] for key in of_all if key in config} | nested[0]


def not_modelled(config: Mapping[str, Any]) -> str | None:
    """Return why the sizes of a configuration do not give its weights and work, or None.

    What fields of a configuration are called, and what values mean, stands in ``config.toml``.
    """
    for key in _CONFIG["experts"]:  # a single expert is a dense layer
        value = config.get(key)
        value = max(value, default=0) if isinstance(value, list) else value  # one for each layer
        if isinstance(value, (int, float)) and value > 1 and not _experts_of(config):
            return (
                f"{key}: found {value}; expected a model of dense layers, or of experts in every "
                f"layer and {_CONFIG['experts_per_token'][0]}"
            )

    kind = str(config.get("model_type", ""))
    if ("moe" in kind.lower() or kind in _CONFIG["expert_types"]) and not _experts_of(config):
        return f"model_type: found {kind!r}; expected a model of dense layers"

    types = config.get("layer_types")
    other = {str(kind) for kind in types} if isinstance(types, list) else set()
    other -= {*_CONFIG["attention"]}
    if other:
        return f"layer_types: found {', '.join(sorted(other))}; expected attention in every layer"
    for expected, keys in _CONFIG["refused"].items():
        for key in filter(config.get, keys):
            return f"{key}: found {str(config[key])[:60]}; expected {expected}"

    if kind in _CONFIG["ungated_types"]:
        return f"model_type: found {kind!r}; expected a gated feed-forward network, as Llama has it"

    return None


def _experts_of(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes of experts if they are all of each layer's feed-forward network, else {}."""

    def first(kind: str) -> Any:
        """Return the value of the first of a kind's names that has one; 0 if none has."""
        return next((config[key] for key in _CONFIG[kind] if config.get(key)), 0)

    count, taken = first("experts"), first("experts_per_token")
    if type(count) is not int or type(taken) is not int or not 1 <= taken <= count:
        return {}
    # Dense layers between those of experts, or a dense part in each, are not modelled.
    if first("beside_experts") or config.get("decoder_sparse_step", 1) != 1:
        return {}

    width: Any = first("expert_ffn") or config.get(_CONFIG["sizes"]["ffn"])
    return {"experts": count, "experts_per_token": taken, "ffn": width}


def architecture_of(config: Mapping[str, Any], name: str, file: Path) -> Architecture:
    """Return the architecture of a configuration."""
    # What a size is called in configurations stands in ``config.toml``.
    experts = _experts_of(config)
    sizes: dict[str, int] = {}
    for field, key in _CONFIG["sizes"].items():
        value = experts.get(field, config.get(key))
        if value is None and field in ("kv_heads", "head_size"):  # which have defaults
            continue
        if value is None:
            raise InputError(f"{file}: found no {key!r}; expected a model's configuration")
        if type(value) is not int or not 1 <= value < 2**31:
            raise InputError(f"{file}: {key}: found {str(value)[:60]!r}; expected an integer >= 1")

        sizes[field] = value

    heads, hidden = sizes["heads"], sizes["hidden"]
    kv_heads = sizes.setdefault("kv_heads", heads)
    if "head_size" not in sizes and hidden % heads:
        found = f"found none for {heads} heads of a hidden size of {hidden}"
        raise InputError(f"{file}: head_dim: {found}; expected an integer")
    if heads % kv_heads:
        found = f"{file}: num_key_value_heads: found {kv_heads}"
        raise InputError(f"{found}; expected a divisor of the {heads} heads")

    # Gemma and Cohere tie their embeddings without a word in the file; the others say so.
    silent = str(config.get("model_type", "")).startswith(("gemma", "cohere"))
    tied = bool(config.get("tie_word_embeddings", silent))
    sizes |= _window_of(config, sizes["layers"])

    notes = tuple(_approximations(config))
    return Architecture(name, **{**sizes, **experts}, tied=tied, notes=notes)


def _window_of(config: Mapping[str, Any], layers: int) -> dict[str, int]:
    """Return how many layers slide over a window, and its tokens; nothing where none is known to.

    Files without a list of `layer_types` say that every k-th layer is full, or leave k to the type
    of the model, of which some have windows in all layers.
    """
    window, kind = config.get("sliding_window"), str(config.get("model_type", ""))
    if type(window) is not int or not 1 <= window <= MAX_TOKENS:
        return {}

    types = config.get("layer_types")
    every = config.get("sliding_window_pattern", _CONFIG["full_every"].get(kind))
    if isinstance(types, list):
        sliding = sum(one == "sliding_attention" for one in types[:layers])
    elif type(every) is int and every >= 1:
        sliding = layers - layers // every
    elif kind in _CONFIG["sliding_types"]:
        sliding = layers
    else:
        return {}

    return {"sliding": sliding, "window": window}


def _approximations(config: Mapping[str, Any]) -> list[str]:
    """Return in words what a configuration says and the architecture leaves out."""
    notes = []
    window = config.get("sliding_window") or config.get("attention_chunk_size")
    context = config.get("max_position_embeddings")
    # Without a list some layers may slide, so it is taken for a list of one that does.
    layers = config.get("layer_types") or ["sliding_attention"]
    slides = config.get("use_sliding_window", True) and set(layers) != {"full_attention"}
    # A window as long as the longest request leaves nothing out.
    cuts = isinstance(window, int) and not (isinstance(context, int) and window >= context)
    if cuts and slides:
        # The KV capacity counts a known number of sliding layers. Otherwise KV is too large, too.
        known = _window_of(config, len(layers))
        error = "too slow" if known.get("sliding") else "too slow and too large"
        notes.append(
            f"attention slides over {window} tokens in some layers and is taken as full, which is "
            f"{error} for longer requests"
        )

    if any(config.get(key) for key in _CONFIG["quantized"]):
        notes.append("weights are quantized and are taken as 16-bit floats")

    return notes


def check_dense(shape: Architecture, place: object) -> None:
    """Raise InputError if a model has experts, whose time no such source gives."""
    if shape.experts:
        raise InputError(
            f"{place}: found {shape.name}, which has {shape.experts} experts; expected a model of "
            "dense layers, or a profile with moe.csv"
        )


def known(name: str) -> Architecture | None:
    """Return the architecture of a name or configuration, or None if it has none."""
    try:
        return architecture(name)
    except InputError:
        return None


def same_architecture(name: str, other: str) -> bool:
    """Return whether two names mean the same model."""
    found = known(name)
    return name == other or (found is not None and found == known(other))
