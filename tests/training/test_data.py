"""Facts, pools and rows: what is held out, what is the same for the same seed, who sees what."""

from __future__ import annotations

import numpy as np
import pytest

from combkv_jax.errors import RequestError
from combkv_jax.evaluation import recall, tasks
from combkv_jax.training import facts, pool, rows
from tests import text

CHUNK = 384


@pytest.fixture(scope="module")
def lm():
    """A tiny model of one token a byte."""
    return text.byte_model("lse", 5, chunk_size=CHUNK)


@pytest.fixture(scope="module")
def full_pool(lm):
    made = pool.Pool(lm, 6, 3, lm.config.cross_layers)
    made.grow_to(7)
    return made


def decode(lm, ids):
    return bytes(lm.tokenizer.decode(ids), "utf-8").decode("utf-8", "replace")


def test_nothing_of_the_evaluation_is_trained_on():
    rng = np.random.default_rng(0)
    told = [
        fact
        for _ in range(150)
        for fact in facts.draw_told(rng, 12, None, facts.draw_names(rng, 20))
    ]
    texts = [fact.sentence for fact in told] + [f.asked(f.phrasing(rng)) for f in told]
    judged = set(tasks.NAMES["judge"].split()) | set(recall.SURNAMES.split())
    judged |= set(tasks.NAMES["choose"].split()) | set(facts.CHECK_LAST)
    words = {word.strip(".,:;?'s") for line in texts for word in line.split()}
    assert not words & judged
    assert "secret code" in tasks.Fact("NAME", "12345").question
    assert not words & {"secret", "code"}
    assert not any(line.startswith("The ") and " of " in line for line in texts)
    checks = facts.draw_checks(rng, 9, tasks.NAMES["choose"].split())
    assert not {c.frame for c in checks} & {*facts.FRAMES, *facts.ASKED}
    nouns = {facts.draw_noun(rng) for _ in range(500)}
    assert len(nouns) > 200  # so many that none is learned by heart
    assert not {word for c in checks for word in c.noun.split()} & set(" ".join(nouns).split())


def test_facts_in_one_draw_have_their_own_keys_and_values_vary():
    rng = np.random.default_rng(1)
    told = facts.draw_told(rng, 300, "password", facts.draw_names(rng, 40))
    assert len({fact.key for fact in told}) == 300
    assert {len(fact.value) for fact in told if fact.value.isdigit()} == {2, 3, 4, 5, 6, 7}


def test_groups_do_not_depend_on_who_made_them_before(lm, full_pool):
    later = pool.Pool(lm, 6, 3, lm.config.cross_layers)
    later.grow_to(7)
    straight = pool.make_group(lm.tokens, later.sentences, CHUNK, 3, 6)
    np.testing.assert_array_equal(full_pool.groups[0].ids, straight.ids)  # 6 took the slot of 0
    np.testing.assert_array_equal(full_pool.ids, later.ids)
    for a, b in zip(full_pool.taps, later.taps, strict=True):
        np.testing.assert_array_equal(a, b)
    other = pool.make_group(lm.tokens, later.sentences, CHUNK, 4, 6)
    assert not np.array_equal(other.ids, straight.ids)


def test_chunks_hold_their_facts(lm, full_pool):
    assert {group.dense for group in full_pool.groups} == {True, False}
    for group in full_pool.groups:
        for ids, inside in zip(group.ids, group.facts, strict=True):
            chunk = decode(lm, ids)
            assert all(placed.fact.sentence in chunk for placed in inside)
            for placed in inside:
                value = decode(lm, ids[placed.start : placed.stop])
                assert value.strip() == f"{placed.fact.value}."
            assert (len(inside) >= 3) if group.dense else (len(inside) <= 1)


def test_rows_ask_about_facts_that_their_history_holds(lm, full_pool):
    ask = rows.Asker(lm.tokens, lambda m: lm.chat_tokens([{"role": "user", "content": m}]))
    asked = texts = 0
    behind = []
    for seed in range(8):
        rng = np.random.default_rng(seed)
        bucket = rows.Bucket(24, 700, 1.0)
        row = rows.draw_row(rng, full_pool, bucket, ask, 0.3)
        ends = np.flatnonzero(row.position > 0)
        assert len(row.ids) == 700
        assert len(row.chunks) == 24
        assert row.last.max() <= 24
        assert ends.max() < 700
        for number in range(row.question.max() + 1):
            at = np.flatnonzero(row.question == number)
            column = row.column[at]
            # Every answer token is predicted from the token in front of it, in its own segment.
            np.testing.assert_array_equal(np.diff(column), 1)
            np.testing.assert_array_equal(row.target[at[:-1]], row.ids[column[1:]])
            begin = row.start[column]
            assert np.all(begin <= column)
            # As far from the history as if recent text lay between them.
            np.testing.assert_array_equal(
                row.position[column] - row.position[begin], column - begin
            )
            behind.append(row.position[begin[0]] - full_pool.lm.config.chunk_size)
            chunks = row.chunks[row.first[column[0]] : row.last[column[0]]]
            history = decode(lm, full_pool.ids[chunks].reshape(-1))
            assert decode(lm, row.target[at]).strip() in history
            first = row.first[column[0]]
            np.testing.assert_array_equal(
                row.sinks[row.history[column[0]]],
                full_pool.ids[row.chunks[first], : lm.config.sink_tokens],
            )
            place = slice(row.sought_first[column[0]], row.sought_last[column[0]])
            tokens = full_pool.ids[row.chunks].reshape(-1)[row.sought[place]]
            told, said = (decode(lm, some).strip() for some in (tokens, row.target[at]))
            assert told.endswith(".")
            assert said in (told, told[:-1])  # a chat's reply is the value alone
            asked += 1
        texts += bool(np.any(row.question == -1))
    assert asked > 50
    assert texts > 0
    assert 0 <= min(behind) < 64
    assert 1024 < max(behind) <= rows.FARTHEST


def test_text_follows_a_page_of_the_history_or_is_astray(lm, full_pool):
    seen, right_behind = {True: 0, False: 0}, 0
    follow = np.stack(
        [
            after[: pool.AFTER + 1]
            for slot, group in enumerate(full_pool.groups)
            for after in (*full_pool.ids[slot * pool.GROUP + 1 :][: pool.GROUP - 1], group.after)
        ]
    )
    for seed in range(60):
        rng = np.random.default_rng(seed)
        chunks, after = rows.draw_history(rng, full_pool, 9)
        assert len(set(chunks)) == len(chunks) <= 9
        piece = rows.draw_text(rng, full_pool, chunks, after)
        text = np.concatenate([piece.prompt, piece.answer])
        (page,) = np.flatnonzero((follow[:, : len(text)] == text).all(axis=1))
        own = piece.alone is None
        seen[own] += 1
        if own:
            slot, inside = divmod(page + 1, pool.GROUP)
            assert not inside or not full_pool.groups[slot].facts[inside]
            # The page in front is there, unless a chunk full of facts took its very place.
            right_behind += page in chunks
            assert page in chunks or any(full_pool.groups[c // pool.GROUP].dense for c in chunks)
        else:
            assert page // pool.GROUP not in {chunk // pool.GROUP for chunk in chunks}
            logits = np.asarray(
                lm({"input_ids": text, "cu_seqlens_q": np.array([0, len(text)])}), np.float64
            )
            logp = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
            wanted = -logp[np.arange(len(text) - 1), text[1:]]
            np.testing.assert_allclose(piece.alone, wanted, rtol=1e-4, atol=1e-5)
    assert all(seen.values())
    assert right_behind > 0.9 * seen[True]


def test_a_key_told_twice_is_not_asked_for(full_pool):
    slot = next(i for i, group in enumerate(full_pool.groups) if group.dense)
    once = rows.askable(full_pool, [slot * pool.GROUP])
    assert once
    assert not rows.askable(full_pool, [slot * pool.GROUP] * 2)


def test_a_text_too_short_for_a_group_is_refused(lm):
    with pytest.raises(RequestError, match="tokens"):
        pool.make_group(lm.tokens, [np.arange(50)] * 9, CHUNK, 0, 0)
