"""Facts that cannot be guessed, told and asked in many ways, for training and for validation.

What the evaluation asks ("The secret code of NAME is DDDDD.", evaluation/tasks.py) must stay
unseen: neither its noun nor its frame ("The ... of ... is") nor its names are made here.
"""

from __future__ import annotations

import dataclasses
import functools
import re

import numpy as np

from combkv_jax.evaluation import recall, tasks

NOUNS = (
    "access number",
    "locker number",
    "ticket number",
    "password",
    "badge number",
    "door combination",
    "account number",
    "telephone extension",
    "order number",
    "membership number",
    "safe combination",
    "invoice number",
    "serial number",
    "pass key",
)

HELD_OUT_NOUNS = "secret code vault figure"  # of the evaluation, and of the checks

# What is told, and how it is asked; {n} noun, {s} subject. A value follows each.
FRAMES = (
    "The {n} for {s} is",
    "{S}'s {n} is",
    "{S} has the {n}",
    "The {n} that belongs to {s} is",
    "Note the {n} for {s}:",
    "{S}, {n}:",
    "Everybody knew that {s} used the {n}",
    "The {n} given to {s} was",
    "Remember, {s} will need the {n}",
    "As to {s}, the {n} is",
    "{S} keeps the {n}",
    "For {s} the {n} was set to",
    "The {n} assigned to {s} reads",
)
ASKED = (
    "The {n} for {s} is",
    "{S}'s {n} is",
    "The {n} that belongs to {s} is",
    "{S} has the {n}",
    "Question: What is the {n} for {s}?\nAnswer:",
    "I was asked for {s}'s {n}, which is",
    "The {n} for {s}:",
)
CHAT = "What is the {n} for {s}? Reply with it alone."


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


FIRST = _words(
    """Aaron Abigail Adrian Alice Amanda Andrew Angela Anthony Audrey Barbara Benjamin Bernard
    Bianca Blake Boris Camille Carla Carlos Cecilia Charlotte Chloe Clara Claudia Colin Connie
    Curtis Damian Daniel Deborah Dennis Diana Dominic Donna Douglas Duncan Eileen Elena Eliza
    Emmett Eric Erika Esther Eugene Evelyn Fabian Frances Frank Gabriel Gavin Georgia Gina Glenn
    Gloria Grant Gregory Hannah Harold Heidi Helen Henrik Howard Hugo Ida Ingrid Iris Jacob Janet
    Jason Jerome Jessica Joanna Joel Joseph Julia Julian Karen Keith Kevin Kirsten Laura Leah Leon
    Linda Lorenzo Lucas Lukas Luther Madeline Malcolm Margot Maria Marvin Matilda Megan Melvin
    Miriam Monica Nathan Nelson Nicola Nina Nora Otis Pamela Patrick Paula Peter Philip Phoebe
    Rachel Raymond Rebecca Renata Ricardo Robin Roger Ronald Rosa Ruben Ruth Samuel Sandra Selma
    Sergio Simon Sonia Spencer Stanley Susan Tamara Tara Thomas Tina Trevor Valentin Vanessa
    Vincenzo Virginia Vivian Wallace Warren Wendy William Yvette Zachary"""
)
LAST = _words(
    """Abbott Acosta Adkins Allison Alvarez Ashford Atkins Baldwin Barker Barlow Barrett Bauer
    Becker Bellamy Bishop Blackwood Bowen Boyle Bradshaw Brewer Bryant Burke Calloway Cannon
    Carver Chandler Church Clayton Cobb Conway Crawford Crosby Cruz Dalton Davenport Dawson Delgado
    Dixon Dorsey Drake Dudley Eaton Elliott Emerson Fairbank Farrell Finch Fischer Fleming Foley
    Fowler Frost Fuller Garrett Gibbons Goodwin Grady Grimes Hale Hammond Harmon Hatcher Hayden
    Heath Hensley Holloway Hooper Horton Huang Hubbard Ibarra Ingram Irwin Jarvis Jennings Joyner
    Keating Keller Kendrick Kirby Knox Kowalski Lambert Lancaster Larkin Lawson Lindgren Livingston
    Locke Lowry Maddox Mahoney Malone Marlowe Mathis McBride Mercer Middleton Monroe Moran Morrow
    Navarro Newell Nolan Norwood Obrien Ortega Osborn Pacheco Palmer Parrish Patel Pennington
    Phelps Pratt Preston Quick Radcliff Ramsey Randall Reyes Rhodes Riggs Rivers Rowland Salazar
    Sawyer Schmidt Sharp Sheldon Singh Sloan Snyder Stafford Stein Stokes Sutton Tanaka Tate
    Thornton Trujillo Underwood Vance Vaughn Wade Walton Weaver Webb Whitaker Wilkins Winslow
    Wolfe Woodard Yates York Zimmerman"""
)
CHECK_LAST = _words(
    """Aldridge Berger Cochran Donovan Ellsworth Ferris Granger Hobbs Ivers Jessup
    Kimball Lockhart Munroe Norris Oakley Prescott Quimby Rutledge Shepard Tolliver Upton Vickers
    Whitlock Yarrow"""
)
OBJECTS = _words(
    """cabinet gate trunk office studio vault garage boat cellar shed chest desk tower archive
    library workshop van greenhouse drawer warehouse"""
)
ADJECTIVES = _words(
    """green blue red yellow black white grey old new small large northern southern eastern
    western wooden iron narrow upper lower"""
)
SYLLABLES = _words(
    """ba be bi bo da de di do fa fe ga go ha he ka ke ki ko la le li lo ma me mi mo na ne
    ni no pa pe ra re ri ro sa se ta te ti to va ve vi vo za ze zo"""
)
WORDS = _words(
    """amber anchor apple arrow basket beacon blossom bridge candle canyon carbon castle cedar
    cherry clover cobalt copper coral cotton crystal dragon ember falcon feather flint forest garnet
    ginger glacier harbor hazel island ivory jasmine jungle kettle lantern lemon marble meadow
    melody mirror orchid otter pebble pepper pilot planet prairie quartz raven ribbon river saddle
    salmon shadow silver spider summit sunset thunder timber tulip tunnel velvet violet walnut
    willow winter"""
)


@dataclasses.dataclass(frozen=True)
class Told:
    """A fact with the frame it is told in; `noun` and `subject` together identify it."""

    noun: str
    subject: str
    value: str
    frame: str

    @property
    def key(self) -> tuple[str, str]:
        return self.noun, self.subject

    @property
    def sentence(self) -> str:
        return f"{self.asked(self.frame)} {self.value}."

    def asked(self, frame: str) -> str:
        """A text that the value continues, after a space."""
        subject = self.subject
        return frame.format(n=self.noun, s=subject, S=subject[0].upper() + subject[1:])

    def phrasing(self, rng: np.random.Generator) -> str:
        """A frame to ask in: often the one it was told in."""
        return self.frame if rng.random() < 0.5 else str(rng.choice(ASKED))


KINDS = _words("number key word mark sign value")  # of a noun made up


@functools.cache
def book_words() -> tuple[str, ...]:
    """Words of the novels for training, without names and nouns that are held out."""
    kept_out = (*tasks.NAMES.values(), recall.SURNAMES, *CHECK_LAST, HELD_OUT_NOUNS)
    held = {word.lower() for text in kept_out for word in text.split()}
    found = re.findall(r"[a-z]{3,12}", tasks.bundled_text(*tasks.BOOKS["train"]).lower())
    return tuple(sorted(set(found) - held))


def draw_noun(rng: np.random.Generator) -> str:
    """One of NOUNS, or one made up of a word of the novels and one of KINDS."""
    if rng.random() < 0.5:
        return str(rng.choice(NOUNS))
    return f"{rng.choice(book_words())} {rng.choice(KINDS)}"


def draw_names(rng: np.random.Generator, count: int) -> tuple[list[str], list[str]]:
    """`count` first and last names each: real ones, words that are no names, and invented ones, so
    that no name is learned by heart."""

    def name(real: tuple[str, ...]) -> str:
        kind = rng.random()
        if kind < 0.4:
            return str(rng.choice(real))
        if kind < 0.75:
            return str(rng.choice(book_words())).title()
        return "".join(rng.choice(SYLLABLES, rng.integers(2, 5))).title()

    return [name(FIRST) for _ in range(count)], [name(LAST) for _ in range(count)]


def draw_subject(rng: np.random.Generator, names: tuple[list[str], list[str]]) -> str:
    """Mostly people of these first and last names, which many share; some things and keys."""
    kind = rng.random()
    first, last = (str(rng.choice(some)) for some in names)
    if kind < 0.75:
        return f"{first} {last}"
    if kind < 0.81:
        return f"{first} {'ABCDEFGHJKLMNPRSTW'[rng.integers(18)]}. {last}"
    if kind < 0.87:
        return f"{first}" if rng.random() < 0.5 else f"{rng.choice(['Mr.', 'Mrs.', 'Miss'])} {last}"
    if kind < 0.93:
        return f"the {rng.choice(ADJECTIVES)} {rng.choice(OBJECTS)}"
    letters = "".join("abcdefghkmnprstwxz"[i] for i in rng.integers(0, 18, 2))
    return f"{letters}-{rng.integers(10, 1000)}"


def draw_value(rng: np.random.Generator) -> str:
    """Two to seven digits, mostly five, and sometimes two words. A third of the numbers have two or
    three different digits, since where a digit comes again is where an answer goes astray."""
    kind = rng.random()
    if kind < 0.06:
        return " ".join(map(str, rng.choice(WORDS, 2, replace=False)))
    count = 5 if kind < 0.6 else int(rng.integers(2, 8 if kind < 0.75 else 4))
    digits = np.arange(10)
    if rng.random() < 1 / 3:
        digits = rng.choice(10, int(rng.integers(2, 4)), replace=False)
    return "".join(map(str, rng.choice(digits, count)))


def draw_told(
    rng: np.random.Generator, count: int, noun: str | None, names: tuple[list[str], list[str]]
) -> list[Told]:
    """`count` facts of one noun (None: of any) about subjects of these names (`draw_names`) with
    distinct keys, told in one frame or in any."""
    frame = None if rng.random() < 0.3 else str(rng.choice(FRAMES))
    facts: dict[tuple[str, str], Told] = {}
    while len(facts) < count:
        fact = Told(
            noun or draw_noun(rng),
            draw_subject(rng, names),
            draw_value(rng),
            frame or str(rng.choice(FRAMES)),
        )
        facts.setdefault(fact.key, fact)
    return list(facts.values())


def draw_checks(rng: np.random.Generator, count: int, firsts: list[str]) -> list[Told]:
    """`count` validation facts: a frame, a noun and surnames that training has not got, and the
    first names given. Names share a word with many others."""
    names = [f"{first} {last}" for first in firsts for last in CHECK_LAST]
    chosen = rng.choice(names, count, replace=False)
    return [
        Told("vault figure", str(name), f"{rng.integers(100000):05d}", "As for {s}, the {n} reads")
        for name in chosen
    ]
