# Device code: Triton compiles it from source and gives its arguments their types, so mypy has none to check.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
"""Device side of `triton_ops`, which launches these kernels and says what their grids mean.

Strides are counted in elements and named ``<tensor>_<axis>`` (t token, h head, d head_dim); those of a layer's pages
are by_page, by_kind (key or value), by_head, by_token, by_dim. Offsets into a pool are int64: it has more than 2**31
elements. Upper-case arguments are compile-time constants; HEADS and DIM are rounded up to a power of two. What changes
from batch to batch is neither constant nor specialized on, so that serving compiles each kernel once.
"""

import triton
import triton.language as tl


@triton.jit
def store_kernel(
    key, value, pages, slots,
    key_t, key_h, key_d, value_t, value_h, value_d,
    by_page, by_kind, by_head, by_token, by_dim,
    kv_heads, head_dim,
    PAGE_SIZE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """One program a token: its key and value of every head."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    head, dim = tl.arange(0, HEADS)[:, None], tl.arange(0, DIM)[None, :]
    inside = (head < kv_heads) & (dim < head_dim)
    to = pages + slot // PAGE_SIZE * by_page + slot % PAGE_SIZE * by_token + head * by_head + dim * by_dim
    element = pages.dtype.element_ty
    new_key = tl.load(key + token * key_t + head * key_h + dim * key_d, mask=inside)
    tl.store(to, new_key.to(element), mask=inside)
    new_value = tl.load(value + token * value_t + head * value_h + dim * value_d, mask=inside)
    tl.store(to + by_kind, new_value.to(element), mask=inside)


@triton.jit
def _load_query(query, offset, live, head_dim, query_d, pages, DIM: tl.constexpr):
    """Rows [ROWS, DIM] from `offset` [ROWS], zero where not live, in the type to multiply in."""
    # That is the one type of query and pool, or float32 where they differ.
    dim = tl.arange(0, DIM)
    inside = live[:, None] & (dim < head_dim)[None, :]
    rows = tl.load(query + offset[:, None] + dim[None, :] * query_d, mask=inside, other=0.0)
    if query.dtype.element_ty == pages.dtype.element_ty:
        return rows
    else:
        return rows.to(tl.float32)


@triton.jit
def _attend(
    query, reach, keys, values, table, start, stop,
    by_page, by_token, by_dim, head_dim, scale,
    PAGE_SIZE: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Attention of query rows [ROWS, DIM] over positions start <= p < stop of one request and kv head.

    Row r sees p <= reach[r], of which there must be at least one among the first KEYS. scale includes log2(e): all
    exponents are base 2. Nothing at `stop` or after it is loaded: it may be garbage, and 0 * NaN is NaN.
    Returns the sum of values [ROWS, DIM], the largest score [ROWS] and the sum of weights relative to it [ROWS].
    """
    dim = tl.arange(0, DIM)
    peak = tl.full([query.shape[0]], -float("inf"), tl.float32)
    total = tl.zeros([query.shape[0]], tl.float32)
    mixed = tl.zeros([query.shape[0], DIM], tl.float32)
    for first in range(start, stop, KEYS):
        position = first + tl.arange(0, KEYS)
        live = position < stop
        page = tl.load(table + position // PAGE_SIZE, mask=live, other=0).to(tl.int64)
        at = page * by_page + position % PAGE_SIZE * by_token
        at = at[:, None] + dim[None, :] * by_dim
        inside = live[:, None] & (dim < head_dim)[None, :]
        key = tl.load(keys + at, mask=inside, other=0.0).to(query.dtype)
        # "ieee": float32 pools are multiplied in float32, as the torch implementation does, not rounded to TF32.
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        score = tl.where(position[None, :] <= reach[:, None], score, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(score, 1))
        weight = tl.exp2(score - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        value = tl.load(values + at, mask=inside, other=0.0).to(query.dtype)
        mixed = mixed * shrink[:, None] + tl.dot(weight.to(query.dtype), value, input_precision="ieee")
        total = total * shrink + tl.sum(weight, 1)
        peak = new_peak
    return mixed, peak, total


@triton.jit(do_not_specialize=["batch", "table_width"])
def extend_kernel(
    query, pages, page_table, query_starts, seq_lens, out,
    query_t, query_h, query_d,
    by_page, by_kind, by_head, by_token, by_dim,
    batch, table_width, heads, group, head_dim, scale,
    PAGE_SIZE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Program (i, h): block i of query tokens, kv head h with its group of query heads. out is contiguous.

    A block is ROWS // group tokens of one request. Request b's blocks are numbered from query_starts[b] // tokens + b:
    that leaves room for each one's blocks before the next one's, and a program finds its request by bisection.
    """
    block, kv_head = tl.program_id(0), tl.program_id(1)
    tokens = ROWS // group
    request, end = 0, batch  # the last request whose blocks begin at or before this one is in request..end-1
    while end - request > 1:
        middle = (request + end) // 2
        begun = tl.load(query_starts + middle) // tokens + middle <= block
        request, end = tl.where(begun, middle, request), tl.where(begun, end, middle)
    start = tl.load(query_starts + request)
    length = tl.load(query_starts + request + 1) - start
    first = (block - (start // tokens + request)) * tokens
    if first >= length:
        return
    past = tl.load(seq_lens + request) - length

    row, dim = tl.arange(0, ROWS), tl.arange(0, DIM)
    token, head = first + row // group, kv_head * group + row % group
    live = (row < tokens * group) & (token < length)
    at = (start + token).to(tl.int64)
    asked = _load_query(query, at * query_t + head * query_h, live, head_dim, query_d, pages, DIM)
    keys = pages + kv_head * by_head
    mixed, _, total = _attend(
        asked, past + tl.minimum(token, length - 1), keys, keys + by_kind, page_table + request * table_width,
        0, past + tl.minimum(first + tokens, length),
        by_page, by_token, by_dim, head_dim, scale, PAGE_SIZE, KEYS, DIM,
    )  # fmt: skip
    to = out + ((at * heads + head) * head_dim)[:, None] + dim[None, :]
    answer = (mixed / total[:, None]).to(out.dtype.element_ty)
    tl.store(to, answer, mask=live[:, None] & (dim < head_dim)[None, :])


@triton.jit(do_not_specialize=["table_width", "splits"])
def decode_kernel(
    query, pages, page_table, seq_lens, partial, weights,
    query_t, query_h, query_d,
    by_page, by_kind, by_head, by_token, by_dim,
    table_width, heads, group, head_dim, scale, splits,
    SPLIT: tl.constexpr, PAGE_SIZE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Program (b, h, i): request b, kv head h with its group of query heads, positions i * SPLIT to (i + 1) * SPLIT.

    Writes its answer to partial [B, heads, splits, head_dim], and to weights [B, heads, splits] the log2 of the sum of
    weights in it, by which `merge_kernel` puts the splits together. Splits past the request's end write nothing.
    """
    request, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    seq_len = tl.load(seq_lens + request)
    start = split * SPLIT
    if start >= seq_len:
        return
    row, dim = tl.arange(0, ROWS), tl.arange(0, DIM)
    head, live = kv_head * group + row, row < group
    asked = _load_query(query, request.to(tl.int64) * query_t + head * query_h, live, head_dim, query_d, pages, DIM)
    keys = pages + kv_head * by_head
    mixed, peak, total = _attend(
        asked, row * 0 + seq_len - 1, keys, keys + by_kind, page_table + request * table_width,
        start, tl.minimum(start + SPLIT, seq_len),
        by_page, by_token, by_dim, head_dim, scale, PAGE_SIZE, KEYS, DIM,
    )  # fmt: skip
    at = (request.to(tl.int64) * heads + head) * splits + split
    to = partial + (at * head_dim)[:, None] + dim[None, :]
    tl.store(to, mixed / total[:, None], mask=live[:, None] & (dim < head_dim)[None, :])
    tl.store(weights + at, peak + tl.log2(total), mask=live)


@triton.jit(do_not_specialize=["splits"])
def merge_kernel(partial, weights, seq_lens, out, heads, head_dim, splits, SPLIT: tl.constexpr, DIM: tl.constexpr):
    """Program (b, h): the answer of request b and query head h from its splits. out is contiguous."""
    request, head = tl.program_id(0), tl.program_id(1)
    dim = tl.arange(0, DIM)
    at = request.to(tl.int64) * heads + head
    peak = -float("inf")
    total = 0.0
    mixed = tl.zeros([DIM], tl.float32)
    for split in range(tl.cdiv(tl.load(seq_lens + request), SPLIT)):
        weight = tl.load(weights + at * splits + split)
        part = tl.load(partial + (at * splits + split) * head_dim + dim, mask=dim < head_dim, other=0.0)
        new_peak = tl.maximum(peak, weight)
        shrink, grow = tl.exp2(peak - new_peak), tl.exp2(weight - new_peak)
        mixed = mixed * shrink + part * grow
        total = total * shrink + grow
        peak = new_peak
    tl.store(out + at * head_dim + dim, (mixed / total).to(out.dtype.element_ty), mask=dim < head_dim)


@triton.jit
def move_kernel(pool, ids, pages, by_page, page_elements, TO_POOL: tl.constexpr, BLOCK: tl.constexpr):
    """Program (i, j): elements j * BLOCK on of page ids[i] of the pool, to or from page i of `pages` (contiguous)."""
    which = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = element < page_elements
    in_pool = pool + tl.load(ids + which).to(tl.int64) * by_page + element
    in_pages = pages + which * page_elements + element
    if TO_POOL:
        tl.store(in_pool, tl.load(in_pages, mask=inside), mask=inside)
    else:
        tl.store(in_pages, tl.load(in_pool, mask=inside), mask=inside)
