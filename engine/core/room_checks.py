"""What a node refuses of a room before it takes it in. The front door has checked all of this, and may be wrong.

A room that cannot be computed fails the step it is in, and with it every room of that step, other front doors' too.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.errors import InvalidField
from engine.core.sampling import SamplingParams, StoppingParams

__all__ = ["check_room"]


def check_room(
    prompt_tokens: int,
    first_index: int,
    sampling: SamplingParams,
    stopping: StoppingParams,
    token_ids: Sequence[int],
    vocab_size: int,
) -> None:
    """Raise InvalidField for the first value that no room may have.

    prompt_tokens: with the first_index tokens that earlier attempts generated. token_ids: all of them, or none where
    they are not needed.
    """
    sampling.validate()
    stopping.validate()
    if not 0 <= first_index < prompt_tokens:
        raise InvalidField("first_index", first_index, f"below {prompt_tokens}, the prompt with what was generated")
    if first_index >= stopping.max_new_tokens:
        raise InvalidField("first_index", first_index, f"below {stopping.max_new_tokens}, the answer's length")
    if token_ids and len(token_ids) != prompt_tokens:
        raise InvalidField("token_ids", len(token_ids), f"{prompt_tokens} tokens")
    if max(token_ids, default=0) >= vocab_size:
        raise InvalidField("token_ids", max(token_ids), f"below {vocab_size}, the size of the vocabulary")
