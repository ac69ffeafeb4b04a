"""The device sampler in tests: rows of equal parameters, slots with counts and edits, and the chi-square test."""

import jax
import jax.numpy as jnp
import numpy as np

from serving.engine.edits import build_edits
from serving.engine.sampling import RowSampling, sample
from serving.engine.slot_state import empty_slots, slot_packets, write_slot
from serving.request import SamplingParams

VOCAB = 40
DRAWS = 4_000
# 1 - 1e-6 quantiles of chi-square at 1..40 degrees of freedom stay below this line.
CHI_SQUARE_LIMIT = {df: df + 5.0 * np.sqrt(2 * df) + 16 for df in range(1, VOCAB + 1)}

sample_all = jax.jit(sample)
write = jax.jit(write_slot)


def draw(logits_RV, rows, state=None):
    """Tokens alone."""
    return np.asarray(sample_all(logits_RV, rows, state or empty_slots(1, logits_RV.shape[1]))[0])


def rows(
    count,
    temperature=1.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    seed=0,
    position=None,
    params=None,
    num_edits=0,
    slot=0,
    vocab_shards=1,
):
    """`params`, if given, say what penalties and logprobs there are."""
    full = lambda value, dtype: jnp.full(count, value, dtype)  # noqa: E731
    p = params or SamplingParams()
    return RowSampling(
        temperature_R=full(temperature, jnp.float32),
        top_k_R=full(top_k, jnp.int32),
        top_p_R=full(top_p, jnp.float32),
        min_p_R=full(min_p, jnp.float32),
        seed_R2=jnp.stack([full(0, jnp.uint32), full(seed, jnp.uint32)], axis=1),
        position_R=jnp.arange(count, dtype=jnp.int32) if position is None else full(position, jnp.int32),
        slot_R=full(slot, jnp.int32),
        repetition_R=full(p.repetition_penalty, jnp.float32),
        presence_R=full(p.presence_penalty, jnp.float32),
        frequency_R=full(p.frequency_penalty, jnp.float32),
        counted_R=full(p.has_penalties, bool),
        num_edits_R=full(num_edits, jnp.int32),
        logprobs_R=full(p.logprobs is not None, bool),
        masked_R=full(False, bool),
        vocab_shards=vocab_shards,
    )


def written(params, prompt=(), answer=(), stop_ids=frozenset(), *, slot=0, state=None, vocab=VOCAB):
    """A state whose slot holds one sequence, and the number of its edits."""
    state = state or empty_slots(3, vocab)
    edits = build_edits(params, frozenset(stop_ids), len(prompt))
    seen = (list(prompt), list(answer)) if params.has_penalties else ([], [])
    for packet in slot_packets(slot, edits, *seen):
        state = write(state, packet)
    return state, edits.shape[1]


def edited(logits_V, params, prompt=(), answer=(), stop_ids=()):
    """Reference: biases and bans, then penalties, token by token in float32."""
    logits = np.asarray(logits_V, np.float32).copy()
    one = np.float32
    for token, bias in params.logit_bias:
        logits[token] += one(bias)
    for token in {*params.banned_token_ids, *(stop_ids if len(answer) < params.min_tokens else ())}:
        logits[token] = -np.inf
    for token in {*prompt, *answer}:
        repetition = one(params.repetition_penalty)
        logits[token] = logits[token] / repetition if logits[token] > 0 else logits[token] * repetition
    for token in set(answer):
        logits[token] -= one(params.frequency_penalty) * one(list(answer).count(token)) + one(params.presence_penalty)
    return logits


def assert_follows(tokens, probabilities_V):
    """Chi-square against the distribution, and nothing impossible."""
    expected = probabilities_V * len(tokens)
    counts = np.bincount(tokens, minlength=len(probabilities_V))
    assert not counts[expected == 0].any(), "a token was drawn that is excluded"
    likely = expected > 0
    if df := int(likely.sum()) - 1:
        chi_square = float(np.sum((counts - expected)[likely] ** 2 / expected[likely]))
        assert chi_square < CHI_SQUARE_LIMIT[df]
