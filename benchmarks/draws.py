"""How often another batch size, or being taken up on another node, changes what a seed draws.

    python -m benchmarks.draws [--model NAME] [--tokens 24]

The last bits of logits differ with the shape of the forward that computes them. The same answers are computed three
ways: decoded alone, decoded all at once, and each token as the end of one chunk, which is what a fail-over does. From
each pair of distributions for the same token follows how probable it is, over all seeds, that it is drawn differently:
by inverting the cumulative distribution F in vocabulary order, sum over ids of |F - F'|; by the race of
`engine.device.sampler`, at most 2d / (1 + d), d being the total variation distance. About a minute on one core.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence

from tokenizers import Tokenizer
from torch import Tensor

from benchmarks.chart import as_table
from engine.core.model_store import default_cache_dir, ensure_prepared
from engine.core.sampling import SamplingParams
from engine.device.batch import Row, build_batch
from engine.device.kv_pool import KVPool
from engine.device.runner import TransformersRunner
from engine.device.sampler import sample
from engine.device.weights import load_model

PAGE_SIZE, PAGES_EACH = 16, 8
PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a small robot who wanted to learn how to paint. It",
    "def quicksort(values):\n    if len(values) <= 1:\n        return values\n",
    "Dear Sir or Madam, I am writing to complain about",
    "The three most important things to know about growing tomatoes are",
    "1, 1, 2, 3, 5, 8, 13,",
    "Question: Why is the sky blue? Answer:",
    "In the beginning",
)
TEMPERATURES = (0.7, 1.0)


class Answers:
    """The prompts and their answers, each with pages of its own."""

    def __init__(self, runner: TransformersRunner, prompts: Sequence[Sequence[int]]):
        self._runner = runner
        self._prompts = prompts
        self.tokens = [list(prompt) for prompt in prompts]

    def forward(self, rows: Sequence[tuple[int, int, int]]) -> Tensor:
        """Logits behind tokens start to end of some answers. rows: (answer, start, end)."""
        batch = [
            Row(self.tokens[i][start:end], start, range(i * PAGES_EACH, (i + 1) * PAGES_EACH), True)
            for i, start, end in rows
        ]
        return self._runner.forward(build_batch(batch, PAGE_SIZE)).double()

    def alone(self, i: int, count: int) -> list[Tensor]:
        """Draw an answer, and return the logits that it was drawn from."""
        start, found = 0, []
        for index in range(count):
            found.append(self.forward([(i, start, len(self.tokens[i]))])[0])
            start = len(self.tokens[i])
            drawn = sample(found[-1].float()[None], [SamplingParams(seed=i)], [index], [()], [None])
            self.tokens[i].append(drawn[0].token_id)
        return found

    def together(self, count: int) -> list[list[Tensor]]:
        """The logits of the answers there are, decoded all at once."""
        lengths = [len(prompt) for prompt in self._prompts]
        steps = [self.forward([(i, 0, length) for i, length in enumerate(lengths)])]
        steps += [
            self.forward([(i, length + step, length + step + 1) for i, length in enumerate(lengths)])
            for step in range(count - 1)
        ]
        return [[step[i] for step in steps] for i in range(len(lengths))]

    def taken_up(self, i: int, count: int) -> list[Tensor]:
        """The logits of an answer, each as those of a prompt that ends there."""
        length = len(self._prompts[i])
        return [self.forward([(i, 0, length + step)])[0] for step in range(count)]


def differences(one: Tensor, other: Tensor, temperature: float) -> tuple[float, float]:
    """The probabilities to draw differently: by inversion, and by the race at most."""
    p, q = (one / temperature).softmax(-1), (other / temperature).softmax(-1)
    apart = float((p - q).abs().sum()) / 2
    return float((p.cumsum(0) - q.cumsum(0)).abs().sum()), 2 * apart / (1 + apart)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=24, help="of each answer")
    arguments = parser.parse_args()
    model = ensure_prepared(arguments.model, default_cache_dir(), print)
    loaded = load_model(model, dtype="float32", max_context=PAGE_SIZE * PAGES_EACH, report=print)
    pool = KVPool(model.layout(PAGE_SIZE, "float32"), PAGES_EACH * len(PROMPTS))
    tokenizer = Tokenizer.from_file(str(model.path / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids for text in PROMPTS]
    answers, count = Answers(TransformersRunner(loaded, pool), prompts), arguments.tokens
    alone = [answers.alone(i, count) for i in range(len(prompts))]
    ways = {
        "decoded with seven others": answers.together(count),
        "taken up elsewhere": [answers.taken_up(i, count) for i in range(len(prompts))],
    }
    table = []
    for way, found in ways.items():
        pairs = [pair for mine, theirs in zip(alone, found, strict=True) for pair in zip(mine, theirs, strict=True)]
        apart = statistics.mean(float((one - other).abs().max()) for one, other in pairs)
        for temperature in TEMPERATURES:
            chances = [differences(*pair, temperature) for pair in pairs]
            inversion, race = (statistics.mean(column) for column in zip(*chances, strict=True))
            table.append([way, f"{temperature:g}", f"{apart:.1e}", f"{inversion:.1e}", f"{race:.1e}"])
    print(as_table(["the token is", "temperature", "logits differ by", "inversion", "race, at most"], table))


if __name__ == "__main__":
    main()
