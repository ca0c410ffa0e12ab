"""The loss of packed samples: cross-entropy of their labels, and KL to the same frozen model with
the whole history in front of it. The head is run where a label is, a block of labels at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from combkv_jax.chunking import IGNORED, Sample, pack
from combkv_jax.config import CombConfig
from combkv_jax.training.samples import Limits
from combkv_jax.training.step import Arrays, assemble

HEAD = 256  # labels whose logits are held at once


class Packs(NamedTuple):
    """R packs of one size, int32: what `CombLlama.hidden_states` takes, [R, ...], and the labels.

    column, target: [R, A], the token that predicts each label, and the label; padding, behind all
    labels, has the target IGNORED. teacher_*: each sample's history and recent tokens as one text,
    and the column of each label there; None without a teacher.
    """

    input_ids: Any
    cu_seqlens_q: Any
    chunk_ids: Any
    cu_seqlens_k: Any
    cu_seqlens_chunk: Any
    column: Any
    target: Any
    teacher_ids: Any = None
    teacher_cu: Any = None
    teacher_column: Any = None

    def batch(self) -> dict[str, Any]:
        """For `CombLlama.hidden_states`."""
        names = ("input_ids", "cu_seqlens_q", "chunk_ids", "cu_seqlens_k", "cu_seqlens_chunk")
        return {name: getattr(self, name) for name in names}


def stack(packs: Sequence[Sequence[Sample]], limits: Limits, taught: bool) -> Packs:
    """Samples, some to a pack, as arrays. taught: with what a teacher reads."""
    made = [_arrays(samples, limits, taught) for samples in packs]
    return Packs(*(None if x[0] is None else np.stack(x) for x in zip(*made, strict=True)))


def _arrays(samples: Sequence[Sample], limits: Limits, taught: bool) -> Packs:
    batch = pack(
        samples,
        num_samples=limits.samples,
        num_chunks=limits.chunks,
        num_tokens=limits.tokens,
        num_chunk_tokens=limits.history,
    )
    labels = batch["shift_labels"][0]
    column = np.flatnonzero(labels != IGNORED).astype(np.int32)
    pad = (0, -(-limits.tokens // HEAD) * HEAD - len(column))
    target = np.pad(labels[column], pad, constant_values=IGNORED)
    teacher = (None, None, None)
    if taught:
        parts = [x for s in samples for x in (*s.chunks, s.tokens)]
        ids = np.concatenate(parts)
        ids = np.pad(ids, (0, limits.tokens + limits.history - len(ids)))
        cu_q, cu_k = batch["cu_seqlens_q"], batch["cu_seqlens_k"]
        # A label's column moves behind the histories of its own and all earlier samples.
        sample = np.searchsorted(cu_q, column, side="right") - 1
        teacher = (ids, cu_q + cu_k, np.pad(column + cu_k[sample + 1], pad))
    return Packs(
        batch["input_ids"][0],
        batch["cu_seqlens_q"],
        batch["chunk_ids"][0],
        batch["cu_seqlens_k"],
        batch["cu_seqlens_chunk"],
        np.pad(column, pad),
        target,
        *teacher,
    )


@dataclasses.dataclass(frozen=True)
class PackedLoss:
    """The mean over labels of nll * cross-entropy + forward * KL(full || ours) + reverse *
    KL(ours || full). remat: make a layer's activations again in the backward pass."""

    config: CombConfig
    nll: float = 1.0
    forward: float = 0.0
    reverse: float = 0.0
    remat: bool = True

    @property
    def is_taught(self) -> bool:
        """Whether the same model with the full context is needed."""
        return bool(self.forward or self.reverse)

    def totals(self, batch: Packs) -> jax.Array:
        """Labels."""
        return jnp.maximum(jnp.sum(batch.target != IGNORED), 1).astype(jnp.float32)

    def loss(self, trained: Arrays, frozen: Arrays, micro: Packs, totals: jax.Array) -> tuple:
        """As `step.Objective.loss`, with the micro-batch's part of each term's mean, [3]."""
        terms = self.terms(trained, frozen, micro) / totals
        return jnp.dot(jnp.array([self.nll, self.forward, self.reverse]), terms), terms

    def terms(self, trained: Arrays, frozen: Arrays, packs: Packs) -> jax.Array:
        """Sums over labels of cross-entropy, forward and reverse KL (0 without a teacher), [3]."""
        model = assemble(self.config, trained, frozen)
        remat = jax.checkpoint if self.remat else None
        size = self.config.chunk_size
        x = model.hidden_states(packs.batch(), longest=size, remat=remat)
        seen = [jnp.take_along_axis(x, packs.column[..., None], axis=1)]  # [R, A, D]
        if self.is_taught:
            full = {"input_ids": packs.teacher_ids, "cu_seqlens_q": packs.teacher_cu}
            taught = jax.lax.stop_gradient(model.hidden_states(full))
            seen.append(jnp.take_along_axis(taught, packs.teacher_column[..., None], axis=1))

        def visit(so_far, block):
            target, *states = block

            def add(so_far):
                return so_far + self._terms(target, *map(model.decoder.logits, states))

            # Labels come first, so blocks of padding cost nothing.
            some = jnp.any(target != IGNORED)
            return jax.lax.cond(some, add, lambda so_far: so_far, so_far), None

        def blocks(x):  # [R, A, ...] -> [blocks, R, HEAD, ...]
            return x.reshape(x.shape[0], -1, HEAD, *x.shape[2:]).swapaxes(0, 1)

        visit = jax.checkpoint(visit, prevent_cse=False)
        return jax.lax.scan(visit, jnp.zeros(3), tuple(map(blocks, (packs.target, *seen))))[0]

    def _terms(self, target, logits, full=None) -> jax.Array:
        counts = target != IGNORED
        ours = jax.nn.log_softmax(logits)
        chosen = jnp.take_along_axis(ours, jnp.maximum(target, 0)[..., None], axis=-1)[..., 0]
        parts = [-chosen]
        if full is not None:
            theirs = jax.lax.stop_gradient(jax.nn.log_softmax(full))
            parts.append(jnp.sum(jnp.exp(theirs) * (theirs - ours), axis=-1))
            parts.append(jnp.sum(jnp.exp(ours) * (ours - theirs), axis=-1))
        sums = [jnp.sum(jnp.where(counts, x, 0.0)) for x in parts]
        return jnp.stack(sums + [jnp.float32(0)] * (3 - len(sums)))
