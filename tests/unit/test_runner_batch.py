import random
from array import array

import pytest
import torch

from engine.device.batch import Row, build_batch


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_batch_equals_its_rows_one_by_one(page_size: int) -> None:
    rng = random.Random(page_size)
    for _ in range(50):
        rows = [random_row(rng, page_size) for _ in range(rng.randint(1, 6))]
        batch = build_batch(rows, page_size)
        token = 0
        logit_rows = []
        for i, row in enumerate(rows):
            assert batch.query_starts[i] == token
            assert batch.seq_lens[i] == row.start + len(row.token_ids)
            used = -(-int(batch.seq_lens[i]) // page_size)
            assert batch.page_table[i, :used].tolist() == list(row.pages[:used])
            assert not batch.page_table[i, used:].any()
            for position, token_id in enumerate(row.token_ids, row.start):
                assert batch.input_ids[token] == token_id
                assert batch.positions[token] == position
                assert batch.slots[token] == row.pages[position // page_size] * page_size + position % page_size
                token += 1
            if row.wants_logits:
                logit_rows.append(token - 1)
        assert batch.query_starts[-1] == token == len(batch.input_ids)
        assert batch.logit_rows.tolist() == logit_rows
        assert batch.is_decode == all(len(row.token_ids) == 1 for row in rows)
        assert {t.dtype for t in (batch.input_ids, batch.positions, batch.slots, batch.logit_rows)} == {torch.int64}
        assert {t.dtype for t in (batch.page_table, batch.query_starts, batch.seq_lens)} == {torch.int32}


def random_row(rng: random.Random, page_size: int) -> Row:
    length, start = rng.choice([1, 1, rng.randint(1, 40)]), rng.choice([0, rng.randint(0, 100)])
    needed = -(-(start + length) // page_size)
    pages = [rng.randrange(1000) for _ in range(needed + rng.randint(0, 2))]
    ids = [rng.randrange(50_000) for _ in range(length)]
    return Row(ids, start, rng.choice([pages, array("i", pages)]), rng.random() < 0.5)
