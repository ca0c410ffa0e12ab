"""What the variants of the ablation learn from, and what they are measured by."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from combkv_jax import console
from combkv_jax.cache import Cache, History, Packed
from combkv_jax.chunking import chunk_tokens
from combkv_jax.compress import compress
from combkv_jax.evaluation import tasks
from combkv_jax.evaluation.metrics import Predicted
from combkv_jax.language_model import LanguageModel
from combkv_jax.model import CombLlama
from combkv_jax.training import facts, pool

PAGES = 3  # of a chat, at most, and of the longest measured history
FACTS = 8  # of a measured page
TEXTS, NEXT = 8, 96  # places of a novel, and tokens predicted there

# Chats with facts in their history


def write_chats(path: Path, lm: LanguageModel, page: int, room: int, seed: int, count: int) -> None:
    """`count` chats as lines of `messages`: one to PAGES pages of the training novels, of about
    `page` tokens each, with training facts in them, and questions for some, in `room` tokens."""
    sentences = tasks.book_sentences(lm.tokens, "train")
    temporary = path.with_name(f".{path.name}.partial")
    with (
        temporary.open("w", encoding="utf-8") as file,
        console.progress(count, "Writing chats", "chats") as advance,
    ):
        made = number = 0
        while made < count:
            # Not the groups that recall is trained on, whose seed is another.
            group = pool.make_group(lm.tokens, sentences, page, seed + 1, number)
            rng = np.random.default_rng([seed, 8, number])
            for messages in _chats(lm, rng, group, room):
                if made < count:
                    file.write(json.dumps({"messages": messages}) + "\n")
                    made += 1
                    advance(1)
            number += 1
    temporary.replace(path)


def _chats(lm: LanguageModel, rng, group: pool.Group, room: int) -> Iterator[list[dict[str, str]]]:
    """The chats that a group's pages make; none where nothing could be asked."""
    first = 0
    while first < pool.GROUP:
        pages = range(first, min(first + int(rng.integers(1, PAGES + 1)), pool.GROUP))
        first = pages.stop
        told = [placed.fact for page in pages for placed in group.facts[page]]
        times = Counter(fact.key for fact in told)
        told = [fact for fact in told if times[fact.key] == 1]
        asked, used = [], 0
        for i in rng.permutation(len(told)):
            turns = _question(rng, told[i])
            used += len(lm.chat_tokens(turns))
            if used > room:
                break
            asked += turns
        if asked:
            read = [_turns(lm.text(group.ids[page]).strip(), "I have read it.") for page in pages]
            yield [*(turn for some in read for turn in some), *asked]


def _question(rng: np.random.Generator, fact: facts.Told) -> list[dict[str, str]]:
    """A question for the fact, answered by its value alone or by a sentence."""
    asked = facts.CHAT.format(n=fact.noun, s=fact.subject)
    if rng.random() < 0.5:
        return _turns(asked, fact.value)
    asked = asked[: asked.index("?") + 1]
    return _turns(asked, f"{fact.asked(fact.phrasing(rng))} {fact.value}.")


def _turns(user: str, assistant: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]


# What all variants are measured by


class Measure:
    """Held-out cases, of the same tokens for every variant, whatever its chunks are.

    facts: by length of the history, in tokens: one page, or PAGES of them as one history, with
    FACTS to a page. texts: pages of a novel and what follows them. seed: of all of them.
    """

    def __init__(self, lm: LanguageModel, page: int, seed: int):
        self.facts = {
            pages * page: tasks.fact_cases(
                lm.tokens,
                seed,
                "choose",
                cases=PAGES // pages,
                chunks=1,
                chunk_size=pages * page,
                facts_per_chunk=pages * FACTS,
            )
            for pages in (1, PAGES)
        }
        self.texts = tasks.text_cases(
            lm.tokens, seed, "choose", cases=TEXTS, chunks=1, chunk_size=page, next_tokens=NEXT
        )
        questions = [q for cases in self.facts.values() for case in cases for q in case.questions]
        self.width = max(len(prompt) + len(answer) for prompt, answer in questions)

    def __call__(self, model: CombLlama) -> dict[str, float]:
        """exact_N, nll_N: of answers behind N tokens, the share of questions that greedy decoding
        gets right, and nats a token. own_nll, other_nll: nats a token of a novel behind its own
        pages and behind another place's; gap: how much less the own ones leave."""
        found = {}
        for tokens, cases in self.facts.items():
            parts = [self._asked(model, case) for case in cases]
            answers = Predicted.concatenate(parts)
            found |= {f"exact_{tokens}": answers.exact, f"nll_{tokens}": answers.mean_nll}
        histories = [_history(model, case.chunks[0]) for case in self.texts]
        for name, shift in (("own", 0), ("other", 1)):
            nlls = [
                _predict(model, histories[i - shift], case.tokens[None])[0]
                for i, case in enumerate(self.texts)
            ]
            found[f"{name}_nll"] = float(np.mean(nlls))
        return found | {"gap": found["other_nll"] - found["own_nll"]}

    def _asked(self, model: CombLlama, case: tasks.FactCase) -> Predicted:
        """All questions of a case, a row each."""
        rows = [np.concatenate(question) for question in case.questions]
        ids = np.stack([np.pad(row, (0, self.width - len(row))) for row in rows])
        nll, right = map(np.asarray, _predict(model, _history(model, case.chunks[0]), ids))
        places = [
            (number, len(prompt) - 1 + i)  # the token in front predicts
            for number, (prompt, answer) in enumerate(case.questions)
            for i in range(len(answer))
        ]
        number, column = np.array(places).T
        return Predicted(nll[number, column], right[number, column], number)


def _history(model: CombLlama, tokens: np.ndarray) -> History:
    return compress(model, [chunk_tokens(tokens, model.config.chunk_size)])


@jax.jit
def _predict(model: CombLlama, history: History, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rows of recent tokens ids [B, T] behind a history of one row -> NLL of each token but the
    first, and whether it was the likeliest, [B, T - 1]."""
    seen, target = ids[:, :-1], ids[:, 1:]
    index = jnp.broadcast_to(jnp.arange(seen.shape[1], dtype=jnp.int32), seen.shape)
    entries = model.entries(history, Packed.causal(index))
    position = index + model.recent_offset(history.count)[:, None]
    lengths = jnp.full(seen.shape[0], seen.shape[1], jnp.int32)
    cache = Cache(tuple(entries), position[:, 0])
    x, _ = model.decoder(seen, position, cache, lengths, model.blocks)
    logits = model.decoder.logits(x)
    chosen = jnp.take_along_axis(logits, target[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen, jnp.argmax(logits, axis=-1) == target
