"""How well a model in training does on a book, names, a noun and a frame it is not trained on."""

from __future__ import annotations

import numpy as np

from combkv_jax import distributed
from combkv_jax.evaluation import tasks
from combkv_jax.evaluation.metrics import Predicted
from combkv_jax.language_model import LanguageModel
from combkv_jax.training import step
from combkv_jax.training.facts import draw_checks
from combkv_jax.training.pool import encode
from combkv_jax.training.rows import Asker, Bucket, Piece, Row, RowBuilder

FACTS = 8  # of a chunk that is full of them
PAGES, PAGE = 4, 8  # places in the book, chunks of each
DENSE = 64  # chunks full of facts
TEXT = 96  # tokens predicted behind a page
ROOM = 448  # tokens of a row of questions


class Checks:
    """Cases made and encoded once, asked as often as wanted.

    single: one chunk full of facts. similar: DENSE chunks full of them. passkey: pages of a novel
    with one fact a chunk, all pages one history. text, other, none: the text behind a page, given
    the page, another one, or nothing.
    """

    def __init__(self, lm: LanguageModel, ask: Asker, seed: int):
        rng = np.random.default_rng([seed, 3])
        size = lm.config.chunk_size
        self.lm, self.ask = lm, ask
        plain = PAGES * PAGE
        told = draw_checks(rng, DENSE * FACTS + plain, tasks.NAMES["choose"].split())
        sentences = tasks.book_sentences(lm.tokens, "choose")
        self.facts, ids, self.after = [], [], []

        def chunk(page, count):
            facts = [told.pop() for _ in range(count)]
            pieces = [np.asarray(lm.tokens(f" {fact.sentence}"), np.int32) for fact in facts]
            room = size - sum(map(len, pieces))
            ids.append(tasks.with_insertions(rng, page, pieces, room))
            self.facts.append(facts)

        stride = len(sentences) // (PAGES + 1)
        for place in range(PAGES):
            page = list(sentences[place * stride : (place + 1) * stride])
            for _ in range(PAGE):
                chunk(page, 1)
            self.after.append(np.concatenate(page)[: TEXT + 1])
        page = list(sentences[PAGES * stride :])
        for _ in range(DENSE):
            if len(page) < size:  # a sentence has a token at least
                page = list(sentences[PAGES * stride :])
            chunk(page, FACTS)
        self.ids = np.stack(ids)
        self.taps = encode(lm, self.ids, lm.config.cross_layers)
        dense = list(range(plain, plain + DENSE))
        self.rows = {
            "single": [self._facts(Bucket(8, ROOM, 0), [[c] for c in dense[:8]], rng)],
            "similar": [self._facts(Bucket(DENSE, ROOM, 0), [dense], rng) for _ in range(2)],
            "passkey": [self._facts(Bucket(DENSE, ROOM, 0), [list(range(plain))], rng)],
            "text": [self._text(0)],
            "other": [self._text(1)],
        }
        self.none = self._nll_without_history()  # nothing that is trained takes part in it

    def _facts(self, bucket: Bucket, histories: list[list[int]], rng) -> Row:
        row = self._builder(bucket)
        for chunks in histories:
            row.add_history(chunks, self.ids[chunks[0], : self.lm.config.sink_tokens])
            facts = [fact for c in chunks for fact in self.facts[c]]
            end = row.used + bucket.tokens // len(histories)
            for i in rng.permutation(len(facts)):
                piece = self.ask(facts[i])
                if row.used + len(piece) > end:
                    break
                row.add_segment([piece])
        return row.finish(0.0)

    def _text(self, shift: int) -> Row:
        row = self._builder(Bucket(PAGES * PAGE, PAGES * (TEXT + 1), 0))
        for place in range(PAGES):
            first = (place + shift) % PAGES * PAGE
            row.add_history(
                list(range(first, first + PAGE)), self.ids[first, : self.lm.config.sink_tokens]
            )
            row.add_segment([Piece(self.after[place][:1], self.after[place][1:], is_text=True)])
        return row.finish(1.0)

    def _nll_without_history(self) -> float:
        borders = np.arange(PAGES + 1) * (TEXT + 1)
        ids = np.concatenate(self.after)
        logits = distributed.fetch(self.lm({"input_ids": ids, "cu_seqlens_q": borders}))
        column = np.delete(np.arange(len(ids)), borders[1:] - 1)
        some = logits[column].astype(np.float64)
        chosen = np.take_along_axis(some, ids[column + 1][:, None], axis=1)[:, 0]
        return float(np.mean(np.logaddexp.reduce(some, axis=1) - chosen))

    def _builder(self, bucket: Bucket) -> RowBuilder:
        config = self.lm.config
        return RowBuilder(bucket, config.chunk_size, config.sink_tokens)

    def measure(self, trained: step.Arrays, frozen: step.Arrays) -> dict[str, float]:
        """NLL of each case, and the share of questions with every token right. "score", lower is
        better: the mean NLL of answers about many chunks, and of text."""
        out = {}
        for name, rows in self.rows.items():
            parts = []
            for row in rows:
                batch = step.stack([row], self.ids, self.taps)
                nll, right, _ = distributed.fetch(
                    step.evaluate(self.lm.config, trained, frozen, batch)
                )
                real = batch.question > -2
                parts.append(
                    Predicted(
                        nll[real],
                        right[real],
                        np.maximum(batch.question[real], 0),
                    )
                )
            all_rows = Predicted.concatenate(parts)
            out[f"{name}_nll"] = all_rows.mean_nll
            if name not in ("text", "other"):
                out[f"{name}_exact"] = all_rows.exact
        out["none_nll"] = self.none
        out["score"] = out["similar_nll"] + out["passkey_nll"] + out["text_nll"]
        return out
