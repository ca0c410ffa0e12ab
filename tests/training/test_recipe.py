"""Recipes: the one that ships, what a file says, and what is refused with the key named."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

import train as command
from combkv_jax.errors import RequestError
from combkv_jax.training import recipe
from combkv_jax.training.recipe import Lesson, Stage
from combkv_jax.training.settings import Settings

RATES = {"rate": 1e-4, "gate_rate": 2e-2, "warmup": 7, "decay": 0.25}


def settings(*arguments, **changes):
    args = vars(command.parser().parse_args(["--out", "run", *arguments]))
    args |= {"steps": args["steps"] or 1000, "recipe": (), "data": tuple(args["data"])}
    args |= {"objective": "answer" if args["data"] or "data" in changes else "recall"} | changes
    return Settings(**{name: args[name] for name in Settings.__dataclass_fields__})


def test_the_shipped_recipe_ends_with_the_rates_and_steps_of_the_command_line():
    first, last = recipe.shipped(None, **RATES)
    assert first.lessons == (Lesson("lookup"),)
    assert last.lessons == (Lesson("recall"), Lesson("lookup"))
    assert (first.steps, last.steps) == (300, 1000)
    assert first.rate == 3e-3
    assert last.rates == settings(**RATES).stages[0].rates
    assert recipe.shipped(7, **RATES)[1] == dataclasses.replace(last, steps=7)


def test_a_recipe_is_read_as_it_is_written(tmp_path):
    tree = {
        "stages": [
            {"steps": 3, "lessons": [{"objective": "recall"}]},
            {
                "steps": 5,
                "rate": 0.5,
                "warmup": 2,
                "lessons": [
                    {"objective": "recall", "weight": 3},
                    {"objective": "distill", "data": "a.jsonl", "reverse": 0, "weight": 0.5},
                    {"objective": "reconstruct", "data": "b/c", "chunks": 2},
                ],
            },
        ]
    }
    (tmp_path / "r.json").write_text(json.dumps(tree))
    first, second = recipe.read(tmp_path / "r.json", **RATES)
    assert first == Stage(3, (Lesson("recall"),), (1.0,), **RATES)
    assert second.rates == recipe.Rates(0.5, 2e-2, 5, 2, 0.25)
    assert second.weights == (3, 0.5, 1.0)
    assert second.lessons[1].terms == (1.0, 1.0, 0)
    assert second.lessons[2] == Lesson("reconstruct", "b/c", chunks=2)
    chosen = settings(recipe=(first, second), steps=8)
    drawn = [chosen.lesson_at(done).objective for done in range(8)]
    assert drawn[:3] == ["recall"] * 3
    many = settings(recipe=(Stage(4000, second.lessons, second.weights, **RATES),))
    drawn = [many.lesson_at(done).objective for done in range(4000)]
    shares = [drawn.count(lesson.objective) / 4000 for lesson in second.lessons]
    np.testing.assert_allclose(shares, np.array([3, 0.5, 1]) / 4.5, atol=0.03)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("stages = 3", r"at least one table \[\[stages\]\]"),
        ("", r"at least one table \[\[stages\]\]"),
        ("steps = [", "cannot be read as toml"),
        ("speed = 3", "the key 'speed'; accepted are stages"),
        ("[[stages]]\nsteps = 0", "steps in stage 1 of .* is 0; it must be a positive whole"),
        ("[[stages]]\nsteps = true", "steps in stage 1 .* is True"),
        ("[[stages]]\nsteps = 3", r"stage 1 of .* needs at least one table \[\[lessons\]\]"),
        ("[[stages]]\nrate = 1", "stage 1 of .* lacks steps"),
        ("[[stages]]\nsteps = 3\nrate = 'x'", "rate in stage 1 of .* is 'x'; .* a positive number"),
        ("[[stages]]\nsteps = 3\nrate = nan", "rate in stage 1"),
        ("[[stages]]\nsteps = 3\ndecay = 2", "decay in stage 1 of .* is 2; .* a share"),
        ("[[stages]]\nsteps = 3\npace = 2", "'pace'; accepted are decay, gate_rate, lessons"),
        ("LESSON weight = 1", "lesson 1 of stage 1 of .* lacks objective; use lookup, recall"),
        ("LESSON objective = 'sing'", "lesson 1 of stage 1 .*'sing' is not known; use lookup"),
        ("LESSON objective = 'next'", "lesson 1 .* needs data"),
        ("LESSON objective = 'recall'\ndata = 'a.txt'", "recall takes no data"),
        ("LESSON objective = 'next'\ndata = 3", "data in lesson 1 .* is 3; it must be a text"),
        ("LESSON objective = 'next'\ndata = 'a.txt'\nnll = 0", "are all 0"),
        ("LESSON objective = 'next'\ndata = 'a.txt'\nforward = -1", "forward in lesson 1 .* is -1"),
        ("LESSON objective = 'recall'\nweight = 0", "weight in lesson 1 .* is 0; .* positive"),
        ("LESSON objective = 'recall'\nwait = 0", "'wait'; accepted are chunks, data"),
    ],
)
def test_what_is_wrong_is_named_by_its_key(tmp_path, content, match):
    lesson = "[[stages]]\nsteps = 3\n[[stages.lessons]]\n"
    (tmp_path / "r.toml").write_text(content.replace("LESSON ", lesson))
    with pytest.raises(RequestError, match=match):
        recipe.read(tmp_path / "r.toml", **RATES)


def test_files_that_are_no_recipes_are_refused(tmp_path):
    with pytest.raises(RequestError, match="neither .toml nor .json"):
        recipe.read(tmp_path / "r.yaml", **RATES)
    with pytest.raises(RequestError, match="is not a file"):
        recipe.read(tmp_path / "r.toml", **RATES)
    (tmp_path / "r.json").write_text("[1]")
    with pytest.raises(RequestError, match="holds a list"):
        recipe.read(tmp_path / "r.json", **RATES)
