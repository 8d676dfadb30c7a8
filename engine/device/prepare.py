"""Prepare a model for serving: ``python -m engine.device.prepare NAME --cache-dir DIR``.

A process of its own, started by `engine.core.model_store.ensure_prepared`. Lines on standard output are progress for
people. Exit code REFUSED_EXIT_CODE means that the last line of standard error is the reason, in words.

Several of these may run at once: a lock file lets one work, the others wait and find the work done. A conversion is
made under a draft name and renamed when complete; the cache entry is written after that.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from tokenizers import Tokenizer

from engine.core.errors import InvalidField
from engine.core.model_store import (
    ARCHITECTURES,
    REFUSED_EXIT_CODE,
    ModelRefused,
    ModelSource,
    PreparedModel,
    check_architecture,
    find_prepared,
    read_prepared,
    record_prepared,
    resolve,
)
from engine.device.weight_files import check_weights

__all__ = ["main", "prepare"]

_TICK = 2.0  # seconds between signs of life
_GGUF_MAGIC = b"GGUF"
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]


def prepare(source: ModelSource, cache_dir: Path) -> PreparedModel:
    """Do what is needed for `find_prepared(source, cache_dir)` to answer. Raises ModelRefused."""
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        lock = (cache_dir / f"{source.key}.lock").open("w")
    except OSError as error:
        raise ModelRefused(f"model_dir is {str(cache_dir)!r}; allowed: a directory to write to ({error})") from error
    try:
        with lock:
            _lock(lock)
            return find_prepared(source, cache_dir) or _prepare(source, cache_dir)
    except (OSError, ValueError) as error:  # of the disk, or a name that the hub does not take
        raise ModelRefused(f"cannot prepare {source.location}: {error}") from error


def _prepare(source: ModelSource, cache_dir: Path) -> PreparedModel:
    if source.kind == "gguf":
        path = _convert_gguf(Path(source.location), cache_dir / source.key)
    else:
        path = _download(source.location) if source.kind == "hub" else Path(source.location)
        _check_directory(path)
    with _step("fingerprinting the weights"):
        return record_prepared(source, cache_dir, path)


def _check_directory(path: Path) -> None:
    """Raise ModelRefused for what no node could serve, as far as can be told without loading it."""
    model = read_prepared(path, path.name, fingerprint="")
    for needed in ("*.safetensors", "tokenizer.json"):
        if not any(path.glob(needed)):
            raise ModelRefused(f"{path} has no {needed}")
    check_weights(path, model)
    try:
        tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    except Exception as error:  # the library raises a bare Exception for whatever is wrong with the file
        raise ModelRefused(f"{path / 'tokenizer.json'} is no tokenizer: {error}") from error
    largest = max(tokenizer.get_vocab().values(), default=0)
    if largest >= model.vocab_size:
        problem = InvalidField("vocab_size", model.vocab_size, f"at least {largest + 1}, to hold tokenizer.json")
        raise ModelRefused(f"{path / 'config.json'}: {problem}")


def _download(hub_id: str) -> Path:
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        with _step(f"downloading {hub_id}"):
            # The configuration alone first: an unsupported model should not cost its weights.
            config = Path(hf_hub_download(hub_id, "config.json"))
            read_prepared(config.parent, hub_id, fingerprint="")
            return Path(snapshot_download(hub_id, allow_patterns=_HUB_FILES, ignore_patterns=["consolidated*", "*/*"]))
    except (HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise ModelRefused(f"cannot download {hub_id}: {' '.join(str(error).split())}") from error


def _convert_gguf(file: Path, target: Path) -> Path:
    """Unpack `file` to safetensors with its tokenizer and chat template, as directory `target`."""
    draft = target.with_name(f".{target.name}.draft")
    for leftover in (draft, target):  # of a process that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    with file.open("rb") as stream:
        if stream.read(len(_GGUF_MAGIC)) != _GGUF_MAGIC:
            raise ModelRefused(f"{file} is no GGUF file: it does not begin with {_GGUF_MAGIC.decode()}")
    print(f"converting {file.name} ({file.stat().st_size / 1e6:.0f} MB), once", flush=True)
    try:
        with _step("loading the converter"):
            from transformers import AutoConfig, AutoTokenizer

            from engine.device.weights import read_weights
        with _step("reading the header"):
            config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
            check_architecture(_architecture_of(config.model_type))
            pre_tokenizer = _pre_tokenizer(file)
        with _step("converting the tokenizer"):
            tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
            if pre_tokenizer is not None:
                tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizer
            tokenizer.save_pretrained(draft)
        with _step("unpacking the weights"):
            model: Any = read_weights(file.parent, gguf_file=file.name, config=config)
        with _step("writing the weights"):
            # They are plain numbers now; while marked as quantized, transformers would not save them.
            model.hf_quantizer = None
            del model.config.quantization_config
            model.save_pretrained(draft)
        for written in draft.iterdir():
            written.chmod(0o644)  # the cache may be shared between users, of a container for instance
        _check_directory(draft)
        draft.rename(target)
    except ModelRefused as refusal:
        raise ModelRefused(f"{file} cannot be converted: {refusal}") from refusal
    except Exception as error:  # whatever a reader makes of a file that is broken or cut off
        problem = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ModelRefused(f"{file} cannot be converted: {problem}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target


def _architecture_of(model_type: str) -> str:
    """Class name for a configuration's model type, the type itself when it is none of ours."""
    return next((name for name in ARCHITECTURES if name.removesuffix("ForCausalLM").lower() == model_type), model_type)


def _pre_tokenizer(file: Path) -> Any:
    """The pre-tokenizer to put in place of the one transformers chooses, None to keep that.

    transformers knows many of the names that GGUF uses for pre-tokenizers and silently takes GPT-2's for others,
    which yields other tokens than the model was trained on. So an unknown name is a refusal.
    """
    from tokenizers import pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    from transformers.integrations.gguf.reader import read_gguf_metadata

    metadata, _ = read_gguf_metadata(str(file))
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name == "smollm":  # GPT-2's with every digit on its own
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    if metadata["tokenizer.ggml.model"] == "gpt2" and name not in {"default", "gpt-2", *GGUF_PRE_TOKENIZER_SPLITS}:
        raise ModelRefused(f"{file.name} asks for the pre-tokenizer {name!r}, which is not known")
    return None


def _lock(file: IO[str]) -> None:
    """Take an exclusive lock on `file`, held until it is closed; the system drops it should this process die."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        with _step("waiting for another process that prepares this model"):
            fcntl.flock(file, fcntl.LOCK_EX)


@contextlib.contextmanager
def _step(what: str) -> Iterator[None]:
    """Print what is being done, and a sign of life while it takes long."""
    start = time.monotonic()
    done = threading.Event()

    def tick() -> None:
        while not done.wait(_TICK):
            print(f"{what}: {time.monotonic() - start:.0f} s", flush=True)

    print(f"{what} ...", flush=True)
    ticker = threading.Thread(target=tick, daemon=True)
    ticker.start()
    try:
        yield
    finally:
        done.set()
        ticker.join()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.device.prepare", description="Prepare a model.")
    parser.add_argument("name", help="model name, directory, .gguf file or Hugging Face id")
    parser.add_argument("--cache-dir", type=Path, required=True)
    options = parser.parse_args(arguments)
    try:
        model = prepare(resolve(options.name), options.cache_dir)
    except ModelRefused as refusal:
        print(str(refusal).replace("\n", " "), file=sys.stderr)
        return REFUSED_EXIT_CODE
    print(f"{model.name} is ready in {model.path}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
