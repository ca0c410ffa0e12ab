"""Where the state and the batches of a run live on a mesh.

The trained arrays lie as the model's do. Adam's moments are divided over `data` as well as over
`tensor` (ZeRO stage 1, Rajbhandari et al. 2020): each device moves its part of the weights, and
the parts are put together again. Rows are divided over `data`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from combkv_jax import sharding
from combkv_jax.config import CombConfig
from combkv_jax.model import declarations
from combkv_jax.training import lookup, step


def new_state(optimise: optax.GradientTransformation, trained: step.Arrays) -> step.State:
    """The state before the first step."""
    return step.State(dict(trained), optimise.init(trained), jnp.int32(0))


@dataclasses.dataclass(frozen=True, eq=False)
class Placing:
    """Of a run on a mesh. trained, moments: shardings by the name of the parameter; whole: of
    what every device holds."""

    placement: sharding.Placement
    trained: Mapping[str, NamedSharding]
    moments: Mapping[str, NamedSharding]
    whole: NamedSharding

    @classmethod
    @functools.cache  # as `step.optimiser`: one object, so that a step is compiled once for it
    def of(cls, config: CombConfig, mesh: jax.sharding.Mesh) -> Placing:
        """Raises RequestError as `sharding.place` does."""
        placement = sharding.place(config.text, mesh)
        declared = {n: d for n, d in declarations(config).items() if step.is_trained(n)}
        return cls(
            placement,
            placement.parameters(declared),
            placement.moments(declared),
            NamedSharding(mesh, P()),
        )

    def state(self, state: step.State) -> step.State:
        """A tree like the state, of shardings."""
        named = jax.tree.map(lambda _: self.whole, state)
        return named._replace(
            trained={name: self.trained[name] for name in state.trained},
            optimiser=self._by_name(state.optimiser, self.moments),
        )

    def batch(self, batch: Any) -> Any:
        """A tree like a batch of micro-batches (`step.accumulated`), of shardings."""
        mesh = self.placement.mesh
        if isinstance(batch, lookup.Batch):  # every question is compared with all chunks
            return jax.tree.map(lambda _: self.whole, batch)
        rows = NamedSharding(mesh, P(None, "data"))
        named = jax.tree.map(lambda _: rows, batch)
        if isinstance(batch, step.Batch):  # its taps lie in blocks: [micro-batches, blocks, rows]
            blocks = NamedSharding(mesh, P(None, None, "data"))
            taps = jax.tree.map(lambda _: blocks, batch.taps)
            named = named._replace(taps=taps, chunk_ids=blocks)
        return named

    def optimiser(self, optimise: optax.GradientTransformation) -> optax.GradientTransformation:
        """The same optimiser, which keeps its moments divided."""
        return _divided(self, optimise)

    def _by_name(self, tree: Any, places: Mapping[str, NamedSharding]) -> Any:
        def place(path, leaf):
            keys = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
            return next((places[key] for key in keys if key in places), self.whole)

        return jax.tree_util.tree_map_with_path(place, tree)


@functools.cache
def _divided(
    placing: Placing, optimise: optax.GradientTransformation
) -> optax.GradientTransformation:
    constrain = jax.lax.with_sharding_constraint

    def update(gradient, state, trained):
        moved, state = optimise.update(constrain(gradient, dict(placing.moments)), state, trained)
        state = constrain(state, placing._by_name(state, placing.moments))
        return constrain(moved, dict(placing.trained)), state

    return optax.GradientTransformation(optimise.init, update)
