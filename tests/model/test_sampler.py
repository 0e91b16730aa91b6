"""The sampler against naive versions of every filter, and its promise that a row depends on nothing but itself."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from model.sampler import History, SampledToken, Sampler, SampleRow, SamplingFailure
from scheduler.messages import SamplingParams

VOCAB = 50
PLAIN = SamplingParams(max_tokens=1, seed=0)
GREEDY = replace(PLAIN, temperature=0.0)

rows_of_logits = st.lists(st.floats(-20, 20, width=32), min_size=VOCAB, max_size=VOCAB)
tokens = st.integers(0, VOCAB - 1)
params_of_any_kind = st.builds(
    SamplingParams,
    max_tokens=st.just(1),
    seed=st.integers(-(2**63), 2**64 - 1),
    choice=st.integers(0, 5),
    temperature=st.sampled_from([0.0, 1e-7, 0.01, 0.7, 1.0, 2.0]),
    top_p=st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]),
    top_k=st.sampled_from([0, 1, 3, 20, VOCAB, 1000]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.3]),
    presence_penalty=st.sampled_from([0.0, -1.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, -0.5, 2.0]),
    logprobs=st.sampled_from([None, 0, 3]),
    logit_bias=st.dictionaries(tokens, st.sampled_from([-100.0, -1.5, 0.3, 100.0]), max_size=5).map(
        lambda bias: tuple(bias.items())
    ),
    allowed_token_ids=st.none() | st.lists(tokens, min_size=1).map(tuple),
    bad_words=st.lists(st.lists(tokens, min_size=1, max_size=3).map(tuple), max_size=4).map(tuple),
)
histories = st.lists(tokens, max_size=12)


def _row(
    params: SamplingParams,
    position: int,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    banned_ids: Sequence[int] = (),
    mask: np.ndarray | None = None,
) -> SampleRow:
    history = History(params, prompt)
    history.add(output)
    return SampleRow(history, position, banned_ids, mask)


def _sample(logits: list[float] | np.ndarray, row: SampleRow) -> SampledToken | SamplingFailure:
    return Sampler(len(logits)).sample(torch.tensor(np.asarray(logits)[None], dtype=torch.float32), [row])[0]


def _token(logits: list[float] | np.ndarray, row: SampleRow) -> int:
    sampled = _sample(logits, row)
    assert isinstance(sampled, SampledToken), sampled
    return sampled.token_id


def _packed(allowed: Set[int] | None, vocab_size: int = VOCAB) -> np.ndarray | None:
    if allowed is None:
        return None
    words = [sum(1 << bit for bit in range(32) if 32 * word + bit in allowed) for word in range(-(-vocab_size // 32))]
    return np.array(words, dtype=np.uint32)


@dataclass(frozen=True)
class Case:
    """All that a token depends on besides the logits."""

    params: SamplingParams
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()
    banned: frozenset[int] = frozenset()
    mask: frozenset[int] | None = None

    @property
    def row(self) -> SampleRow:
        position = len(self.prompt) + len(self.output)
        return _row(self.params, position, self.prompt, self.output, sorted(self.banned), _packed(self.mask))


cases = st.builds(
    Case,
    params_of_any_kind,
    histories,
    histories,
    st.frozensets(st.integers(0, VOCAB - 2), max_size=5),
    st.none() | st.frozensets(tokens, min_size=1),
)


def _naive_allowed(case: Case, vocab_size: int) -> set[int]:
    left = set(range(vocab_size)) - case.banned
    if case.mask is not None:
        left &= case.mask
    if case.params.allowed_token_ids is not None:
        left &= set(case.params.allowed_token_ids)
    said = tuple(case.output)
    return left - {word[-1] for word in case.params.bad_words if said[len(said) - len(word) + 1 :] == word[:-1]}


def _naive_support(logits: Sequence[float], case: Case) -> dict[int, float]:
    """Token id -> probability after everything, written as plainly as possible."""
    params = case.params
    changed = [float(np.float32(value)) for value in logits]
    for token, bias in params.logit_bias:
        changed[token] = float(np.float32(changed[token] + bias))
    for token in set(case.prompt) | set(case.output):
        value = changed[token]
        changed[token] = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
    for token in set(case.output):
        count = list(case.output).count(token)
        changed[token] -= params.frequency_penalty * count + params.presence_penalty
    allowed = _naive_allowed(case, len(logits))
    alive = {token: float(np.float32(value)) for token, value in enumerate(changed) if token in allowed}
    if not alive:
        return {}
    peak = max(alive.values())
    if params.temperature < 1e-5:
        return {min(token for token, value in alive.items() if value == peak): 1.0}
    weight = {token: math.exp((value - peak) / params.temperature) for token, value in alive.items()}
    weight = {token: value for token, value in weight.items() if value >= params.min_p}
    ranked = sorted(weight, key=lambda token: (-alive[token], token))
    if params.top_k:
        ranked = ranked[: params.top_k]
    total, before, kept = sum(weight[token] for token in ranked), 0.0, []
    for token in ranked:
        if kept and before >= (params.top_p + 1e-6) * total:  # shares are right to a millionth
            break
        kept.append(token)
        before += weight[token]
    total = sum(weight[token] for token in kept)
    return {token: weight[token] / total for token in kept if weight[token] > 0}


@settings(max_examples=500, deadline=None)
@given(rows_of_logits, cases)
def test_a_token_is_one_that_is_allowed_and_that_the_filters_leave(logits: list[float], case: Case) -> None:
    support = _naive_support(logits, case)
    if support:
        assert _token(logits, case.row) in support
    else:
        failure = _sample(logits, case.row)
        assert isinstance(failure, SamplingFailure) and not failure.is_broken


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(rows_of_logits, cases), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_a_row_does_not_depend_on_the_others(items: list[tuple[list[float], Case]], rng: random.Random) -> None:
    alone = [_sample(logits, case.row) for logits, case in items]
    order = list(range(len(items)))
    rng.shuffle(order)
    batch = torch.tensor([items[index][0] for index in order], dtype=torch.float32)
    before = batch.clone()
    together = Sampler(VOCAB).sample(batch, [items[index][1].row for index in order])
    assert together == [alone[index] for index in order]
    assert torch.equal(batch, before)


def _frequencies(logits: list[float], params: SamplingParams, draws: int) -> np.ndarray:
    rows = [_row(params, position) for position in range(draws)]
    sampled = Sampler(len(logits)).sample(torch.tensor(logits).expand(draws, -1), rows)
    return np.bincount([token.token_id for token in sampled], minlength=len(logits))  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "params",
    [
        PLAIN,
        replace(PLAIN, temperature=0.6, seed=5),
        replace(PLAIN, top_k=4),
        replace(PLAIN, top_p=0.8, choice=3),
        replace(PLAIN, min_p=0.2, seed=-1),
        replace(PLAIN, top_k=6, top_p=0.7, temperature=1.5),
    ],
)
def test_draws_follow_the_distribution(params: SamplingParams) -> None:
    logits = [2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -3.0, -30.0]
    draws = 6000
    support = _naive_support(logits, Case(params))
    counts = _frequencies(logits, params, draws)
    assert set(np.flatnonzero(counts)) <= set(support)
    chi_square = sum((counts[token] - draws * p) ** 2 / (draws * p) for token, p in support.items() if draws * p >= 5)
    assert chi_square < 35  # at most 7 degrees of freedom: exceeded once in 90000 seeds


FILTERS = [
    PLAIN,
    replace(PLAIN, temperature=0.3),
    replace(PLAIN, temperature=2.5),
    replace(PLAIN, top_p=0.9),
    replace(PLAIN, top_p=0.999, temperature=2.0),  # a nucleus of unlikely tokens
    replace(PLAIN, top_k=5),
    replace(PLAIN, top_k=40),  # more than there are blocks
    replace(PLAIN, top_k=40, top_p=0.8),
    replace(PLAIN, min_p=0.02),
    replace(PLAIN, min_p=0.001, top_k=100, top_p=0.95, temperature=1.7),
]


def _uniform(position: int) -> float:
    """The number in [0, 1) that seed 0 has for the first choice's token at `position`."""
    return (xxhash.xxh3_64_intdigest(struct.pack("<QQQ", 0, 0, position)) >> 11) / 2**53


@pytest.mark.parametrize("params", FILTERS)
def test_draws_are_the_inverse_of_the_cumulative_distribution_in_the_order_of_ids(params: SamplingParams) -> None:
    """Over several blocks of weights and a part of one."""
    logits = (np.random.default_rng(7).normal(size=2500) * 3).astype(np.float32)
    support = _naive_support(logits.tolist(), Case(params))
    ids = sorted(support)
    cumulative = np.cumsum([support[token] for token in ids])
    drawn = [_token(logits, _row(params, position)) for position in range(100)]
    assert drawn == [ids[int(cumulative.searchsorted(_uniform(position), "right"))] for position in range(100)]
    assert len(set(drawn)) > 2


@pytest.mark.parametrize("threads", [1, 2])
def test_bits_do_not_depend_on_company_or_threads(threads: int) -> None:
    """Enough rows for more than one call, of a vocabulary that fills no block and no vector."""
    vocab_size, before = 20_011, torch.get_num_threads()
    sampler = Sampler(vocab_size)
    logits = torch.randn(23, vocab_size, generator=torch.Generator().manual_seed(3)) * 4
    rows = [_row(replace(FILTERS[index % len(FILTERS)], logprobs=2), index, (index,), (5, 6)) for index in range(23)]
    alone = [Sampler(vocab_size).sample(logits[index : index + 1], [row])[0] for index, row in enumerate(rows)]
    torch.set_num_threads(threads)
    try:
        assert sampler.sample(logits, rows) == alone
        assert sampler.sample(logits[5:9], rows[5:9]) == alone[5:9]
        ids = [token.token_id for token in alone if isinstance(token, SampledToken)]
        assert sampler.score(logits, ids, [2] * 23) == alone
    finally:
        torch.set_num_threads(before)


def test_noise_depends_on_seed_choice_and_position_alone() -> None:
    flat = [0.0] * 1000
    base = _row(replace(PLAIN, seed=42), 7)
    others = [
        _row(replace(PLAIN, seed=43), 7),
        _row(replace(PLAIN, seed=42, choice=1), 7),
        _row(replace(PLAIN, seed=42), 8),
    ]
    assert _token(flat, base) == _token(flat, _row(replace(PLAIN, seed=42), 7, (1, 2, 3), (4,)))
    assert len({_token(flat, row) for row in (base, *others)}) == 4


def test_a_seed_names_the_same_draws_for_ever() -> None:
    """Another value here would change what a client's seed means."""
    drawn = [_token([0.0] * 1000, _row(replace(PLAIN, seed=1), position)) for position in range(4)]
    assert drawn == [85, 492, 261, 811]


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    logits = [0.0, 3.0, 1.0, 3.0]
    assert _token(logits, _row(GREEDY, 0)) == 1
    assert _token(logits, _row(replace(PLAIN, top_k=1), 0)) == 1
    assert _token(logits, _row(replace(PLAIN, temperature=1e-9), 0)) == 1
    assert _token(logits, _row(GREEDY, 0, banned_ids=(1,))) == 3


def test_a_wide_nucleus_is_exact() -> None:
    """More tokens than the first guess sorts; all equal, so the nucleus is a prefix of the ids."""
    logits = [0.0] * 2000
    params = replace(PLAIN, top_p=0.5)
    drawn = {_token(logits, _row(params, position)) for position in range(3000)}
    assert max(drawn) < 1000
    assert len(drawn) > 900


@settings(max_examples=100, deadline=None)
@given(rows_of_logits, histories)
def test_logprobs_are_those_of_the_raw_logits(logits: list[float], output: list[int]) -> None:
    params = replace(PLAIN, logprobs=4, temperature=0.5, presence_penalty=1.0, top_k=5)
    sampled = _sample(logits, _row(params, 9, (), output))
    assert isinstance(sampled, SampledToken)
    expected = torch.log_softmax(torch.tensor(logits, dtype=torch.float64), 0)
    assert sampled.logprob == pytest.approx(expected[sampled.token_id].item(), abs=1e-5)
    assert sampled.rank == 1 + sum(value > logits[sampled.token_id] for value in logits)
    ranked = sorted(range(VOCAB), key=lambda token: (-logits[token], token))[:4]
    assert [token for token, _ in sampled.top] == ranked
    assert [value for _, value in sampled.top] == pytest.approx(expected[ranked].tolist(), abs=1e-5)


def test_logprobs_of_the_chosen_token_alone_or_none() -> None:
    alone = _sample([0.0, 0.0], _row(replace(GREEDY, logprobs=0), 0))
    assert alone == SampledToken(0, pytest.approx(math.log(0.5)), 1, ())
    assert _sample([0.0, 0.0], _row(GREEDY, 0)) == SampledToken(0)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_broken_row_fails_alone(broken: float) -> None:
    logits = torch.zeros(3, 8)
    logits[1, 5] = broken
    logits[2, 6] = 1.0
    for params in (GREEDY, PLAIN, replace(GREEDY, repetition_penalty=2.0)):
        first, second, third = Sampler(8).sample(logits, [_row(params, 11)] * 3)
        assert isinstance(first, SampledToken)
        assert isinstance(second, SamplingFailure)
        assert "position 11" in second.message
        assert isinstance(third, SampledToken)


def test_nothing_left_to_choose_is_the_requests_failure_not_the_networks() -> None:
    for params, banned, named in (
        (PLAIN, (0, 1), "min_tokens"),
        (replace(PLAIN, allowed_token_ids=(1,)), (1,), "allowed_token_ids and min_tokens"),
        (replace(GREEDY, bad_words=((0,), (1,))), (), "bad_words"),
        (replace(GREEDY, allowed_token_ids=()), (), "allowed_token_ids"),
    ):
        failure = _sample([0.0, 1.0], _row(params, 3, banned_ids=banned))
        assert isinstance(failure, SamplingFailure) and not failure.is_broken
        assert failure.message == f"{named} leave no token to choose at position 3"
    nothing = _sample([0.0, 1.0], _row(PLAIN, 0, mask=np.zeros(1, dtype=np.uint32)))
    assert isinstance(nothing, SamplingFailure) and not nothing.is_broken and "the grammar" in nothing.message
    broken = _sample([-math.inf, -math.inf], _row(PLAIN, 0))
    assert isinstance(broken, SamplingFailure) and broken.is_broken


# -- what changes the logits -----------------------------------------------------------------------------------------


def test_a_bias_is_added_to_the_logit() -> None:
    logits = [0.0, 1.0, 2.0]
    assert _token(logits, _row(replace(GREEDY, logit_bias=((0, 2.5),)), 0)) == 0
    assert _token(logits, _row(replace(GREEDY, logit_bias=((2, -1.5), (0, 0.5))), 0)) == 1
    # It is added before the penalty, which halves what has become positive: (1.5 + 1) / 2 < 1.4 < 1.5 / 2 + 1.
    row = _row(replace(GREEDY, logit_bias=((0, 1.0),), repetition_penalty=2.0), 1, (0,))
    assert _token([1.5, 1.4], row) == 1


def test_only_allowed_tokens_are_chosen() -> None:
    params = replace(PLAIN, allowed_token_ids=(4, 7, 4), temperature=3.0)
    assert {_token([0.0] * 9, _row(params, position)) for position in range(100)} == {4, 7}
    assert _token(list(range(9)), _row(replace(GREEDY, allowed_token_ids=(5, 2)), 0)) == 5


@pytest.mark.parametrize(
    ("word", "output", "is_banned"),
    [
        ((2,), [], True),
        ((1, 2), [], False),
        ((1, 2), [1], True),
        ((1, 2), [1, 0], False),
        ((0, 1, 2), [1], False),
        ((0, 1, 2), [5, 0, 1], True),
        ((0, 1, 2), [0, 1, 2], False),
        ((1, 1, 2), [0, 1], False),
    ],
)
def test_the_last_token_of_a_bad_word_is_banned_after_the_others(
    word: tuple[int, ...], output: list[int], is_banned: bool
) -> None:
    row = _row(replace(GREEDY, bad_words=(word,)), 9, (0, 1), output)
    assert (_token([0.0, 1.0, 2.0], row) == 1) is is_banned


@pytest.mark.parametrize("dtype", [np.uint32, np.int32])
@pytest.mark.parametrize("vocab_size", [31, 32, 33, 100])
def test_a_mask_has_a_bit_for_each_token(dtype: type, vocab_size: int) -> None:
    logits = np.linspace(0, 1, vocab_size)
    for allowed in ({0}, {vocab_size - 1}, {3, 30}, set(range(0, vocab_size, 7))):
        packed = _packed(allowed, vocab_size)
        assert packed is not None
        assert _token(logits, _row(GREEDY, 0, mask=packed.view(dtype))) == max(allowed)
        drawn = {
            _token(logits, _row(PLAIN, position, mask=packed.view(dtype))) for position in range(20 * len(allowed))
        }
        assert drawn <= allowed and len(drawn) > len(allowed) // 2


def test_the_bits_past_the_vocabulary_mean_nothing() -> None:
    full = np.full(2, -1, dtype=np.int32)
    assert _token([0.0] * 32 + [1.0], _row(GREEDY, 0, mask=full)) == 32


@pytest.mark.parametrize("words", [0, 1, 3])
def test_a_mask_of_another_vocabulary_is_refused(words: int) -> None:
    with pytest.raises(ValueError, match="2 words"):
        _sample([0.0] * 33, _row(GREEDY, 0, mask=np.zeros(words, dtype=np.uint32)))


def test_tokens_at_minus_infinity_are_never_drawn() -> None:
    logits = [-math.inf, 0.0, -math.inf]
    assert {_token(logits, _row(PLAIN, position)) for position in range(200)} == {1}


def test_on_a_device_only_rows_that_need_their_logits_take_another_way() -> None:
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(0))
    logits[1, 7] = math.nan
    logits[2, [9, 4]] = 50.0
    params = [GREEDY, GREEDY, GREEDY, PLAIN, replace(GREEDY, logprobs=2), replace(GREEDY, logit_bias=((3, 100.0),))]
    rows = [_row(each, position) for position, each in enumerate(params)]
    sampler = Sampler(VOCAB)
    assert sampler._sample_on_device(logits, rows) == sampler._sample_on_host(logits, rows)
    assert sampler._sample_on_device(logits[:0], []) == []
    only = [_row(PLAIN, 3)]
    assert sampler._sample_on_device(logits[3:4], only) == sampler._sample_on_host(logits[3:4], only)


def test_shapes_are_checked() -> None:
    assert Sampler(4).sample(torch.zeros(0, 4), []) == []
    with pytest.raises(ValueError, match="do not fit"):
        Sampler(4).sample(torch.zeros(1, 5), [_row(PLAIN, 0)])
    with pytest.raises(ValueError, match="do not fit"):
        Sampler(4).sample(torch.zeros(2, 4), [_row(PLAIN, 0)])
