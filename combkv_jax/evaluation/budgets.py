"""A budget of memory, and the options with which a cache keeps to it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from combkv_jax import compress, console
from combkv_jax.cache import (
    CODED,
    POLICIES,
    Cache,
    Comb,
    History,
    LayerCache,
    full_cache_bytes,
    nbytes,
)
from combkv_jax.cache.quantize import check_bits
from combkv_jax.errors import RequestError
from combkv_jax.generate import new_cache
from combkv_jax.language_model import LanguageModel

CACHES: dict[str, type[LayerCache]] = {**POLICIES, "comb": Comb}
LARGEST = 2**24  # that an option may be, and more tokens than any model has positions
ROOM = 256  # tokens that a cache holds behind a context: a question and its answer, or a text
UNITS = {"B": 1} | {f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)}
UNITS |= {f"{p}iB": 1024**i for i, p in enumerate("KMGT", 1)}


@dataclasses.dataclass(frozen=True)
class Asked:
    """A cache as it was asked for: its policy and the options given to it."""

    policy: str
    given: Mapping[str, Any]


def read_cache(text: str) -> Asked:
    """`tailor` or `tailor:top=128,bits=2,quantized=0+1` (layers; `none` for no layer). Raises
    RequestError for what there is not, with the list of what there is."""
    name, colon, rest = text.partition(":")
    if name not in CACHES:
        raise RequestError(f"cache {name!r} is not one of {', '.join(CACHES)}.")
    defaults, given = CACHES[name].defaults, {}
    for part in rest.split(",") if colon else ():
        option, _, value = part.partition("=")
        if option not in defaults:
            known = ", ".join(defaults) or "none"
            raise RequestError(f"the {name} cache has no option {option!r}; it takes {known}.")
        if option in given:
            raise RequestError(f"{text!r} gives {option} twice; give it once.")
        given[option] = _value(f"{option} of the {name} cache", value, defaults[option])
    return Asked(name, given)


def _value(name: str, text: str, default: Any) -> Any:
    if isinstance(default, tuple) and text == "none":
        return ()
    try:
        numbers = tuple(int(part) for part in text.split("+"))
    except ValueError:
        numbers = ()
    if all(abs(number) < LARGEST for number in numbers):
        if isinstance(default, tuple) and numbers:
            return numbers
        if len(numbers) == 1:
            return numbers[0]
    what = f"a whole number below {LARGEST}"
    if isinstance(default, tuple):
        what = "layers such as 0+7, or none"
    raise RequestError(f"{name} is {text!r}; it must be {what}.")


def with_bits(caches: Sequence[Asked], bits: int) -> list[Asked]:
    """The caches with that number of bits. Raises RequestError where one takes none."""
    without = [cache.policy for cache in caches if cache.policy not in CODED]
    if without:
        known, others = " and ".join(CODED), ", ".join(dict.fromkeys(without))
        raise RequestError(
            f"--cache-bits works with the caches {known}, not {others}; write {CODED[0]}:bits="
            f"{bits} to set it for one of several."
        )
    return [Asked(cache.policy, {"bits": bits, **cache.given}) for cache in caches]


@dataclasses.dataclass(frozen=True)
class Budget:
    """How much a cache may be: tokens that a decoded query sees of a layer (`unit` "tokens"), or
    bytes on the device ("bytes"), or a share of those of the full cache ("share")."""

    text: str
    unit: str
    amount: float

    @classmethod
    def read(cls, text: str) -> Budget:
        """512, 64MB (or KiB, GB, ...) or 5%. Raises RequestError for anything else."""
        match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?) ?([A-Za-z%]*)", text)
        amount = float(match[1]) if match else 0.0
        if match and amount > 0:
            if match[2] == "%":
                return cls(text, "share", amount / 100)
            if match[2] in UNITS:
                return cls(text, "bytes", amount * UNITS[match[2]])
            if not match[2] and amount == int(amount):
                return cls(text, "tokens", amount)
        raise RequestError(
            f"budget {text!r} is not a positive amount such as 512 (tokens), 64MB or 5%."
        )

    def of(self, full: int) -> int:
        """Bytes, where the full cache has `full`; of a budget in bytes or a share."""
        return int(self.amount if self.unit == "bytes" else self.amount * full)

    def holds(self, tokens: int, full: int) -> bool:
        """Whether all `tokens`, `full` bytes, are within it."""
        return self.amount >= tokens if self.unit == "tokens" else self.of(full) >= full


@dataclasses.dataclass(frozen=True)
class Setting:
    """A cache with all of its options, for contexts of `tokens` and `room` tokens behind them."""

    policy: str
    options: Mapping[str, Any]
    tokens: int
    room: int = ROOM

    @property
    def recent(self) -> int:
        """Tokens of the context that are not compressed."""
        if self.policy != "comb":
            return self.tokens
        return min(self.options["window"], self.tokens)

    def empty(self, lm: LanguageModel, history: History | None) -> Cache:
        """With room for the context, or what is not in the history of it, and `room` tokens."""
        if self.policy == "comb":
            return new_cache(lm.model, self.recent + self.room, history)
        options = dict(self.options)
        return new_cache(lm.model, self.tokens + self.room, policy=self.policy, options=options)

    def nbytes(self, lm: LanguageModel) -> dict[str, int]:
        """As `measure`, of such a cache that is not made. Raises RequestError for options that the
        policy cannot take."""
        if self.policy == "comb":
            check_bits(self.options["bits"])
            if self.options["window"] < 1:
                raise RequestError(
                    f"window of the comb cache is {self.options['window']}; it must be a whole "
                    "number of at least 1."
                )
        found = {}

        def make():
            history = None
            if self.recent < self.tokens:
                bits = self.options["bits"]
                history = compress.blank(lm.model, self.tokens - self.recent, bits)
            cache = self.empty(lm, history)
            found.update(measure(cache))
            return cache.position

        jax.eval_shape(make)
        return found


def measure(cache: Cache) -> dict[str, int]:
    """Bytes on the device and on the host, and those that a decoded token fetches from the host."""
    return nbytes(cache) | {"fetched": sum(entry.fetched for entry in cache.layers)}


def settle(
    lm: LanguageModel, asked: Asked, budget: Budget, tokens: int, room: int = ROOM
) -> Setting:
    """The cache for contexts of `tokens` with all its options: the sizes that were not given are
    the largest that keep to the budget.

    What a query fetches from the host counts as if it stayed on the device, as in the papers: at
    the same budget each policy's queries see about as many tokens. A budget that holds the whole
    context holds everything that comes behind it, too. Raises RequestError where the budget is too
    small, with the least that would do, and for options that the policy cannot take.
    """
    policy, given = CACHES[asked.policy], dict(asked.given)
    if "generated" in policy.defaults:
        given = {"generated": room, **given}
    if asked.policy == "tailor":
        given = {**lm.tailored(room), **given}

    def setting(options: Mapping[str, Any]) -> Setting:
        return Setting(asked.policy, {**policy.defaults, **options}, tokens, room)

    def sized(size: int) -> Setting:
        return setting(policy.sized(size, given))

    setting(given).nbytes(lm)  # refuses what the policy cannot take
    full = full_cache_bytes(lm.config.text, tokens, lm.model.dtype)
    options = {**policy.defaults, **given}
    least = sum(options[name] for name in policy.beside)
    most = max(tokens + room, least + (options[policy.unit] if policy.unit else 1))
    is_free = any(name not in given for name in policy.sizes)
    holds = budget.holds(tokens, full)
    if not is_free or (budget.unit == "tokens" and not policy.in_tokens and not holds):
        return setting(given)
    sized(most).nbytes(lm)
    if holds:
        return sized(most)

    def takes(size: int) -> float:
        """Of the budget; infinite where the policy cannot be so small."""
        try:
            held = sized(size).nbytes(lm)
        except RequestError:
            return float("inf")
        return size if budget.unit == "tokens" else held["device"] + held["fetched"]

    limit = int(budget.amount) if budget.unit == "tokens" else budget.of(full)
    if budget.unit == "tokens" and takes(limit) <= limit:
        return sized(limit)
    smallest = _first(1, most, lambda size: takes(size) < float("inf"))
    if takes(smallest) > limit:
        least = f"{smallest} tokens"
        if budget.unit != "tokens":
            least = console.size(int(takes(smallest)))
        raise RequestError(
            f"a budget of {budget.text} is too small for the {asked.policy} cache of {tokens} "
            f"tokens; it needs at least {least}."
        )
    return sized(_first(smallest, most + 1, lambda size: takes(size) > limit) - 1)


def _first(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The first number from `low` on for which `holds`; it is taken to hold at `high`."""
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low
