"""Facts that cannot be guessed, told and asked in many ways, for training and for validation.

What the evaluation asks ("The secret code of NAME is DDDDD.", evaluation/tasks.py) must stay
unseen: neither its noun nor its frame ("The ... of ... is") nor its names are made here.
"""

from __future__ import annotations

import dataclasses

import numpy as np

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


def draw_subject(rng: np.random.Generator) -> str:
    """Mostly people whose names share a word with others', some invented names, things, keys."""
    kind = rng.random()
    first, last = str(rng.choice(FIRST)), str(rng.choice(LAST))
    if kind < 0.55:
        return f"{first} {last}"
    if kind < 0.65:
        return f"{first} {'ABCDEFGHJKLMNPRSTW'[rng.integers(18)]}. {last}"
    if kind < 0.75:
        made = ["".join(rng.choice(SYLLABLES, rng.integers(2, 4))).title() for _ in range(2)]
        return " ".join(made[: rng.integers(1, 3)])
    if kind < 0.85:
        return f"{first}" if rng.random() < 0.5 else f"{rng.choice(['Mr.', 'Mrs.', 'Miss'])} {last}"
    if kind < 0.93:
        return f"the {rng.choice(ADJECTIVES)} {rng.choice(OBJECTS)}"
    letters = "".join("abcdefghkmnprstwxz"[i] for i in rng.integers(0, 18, 2))
    return f"{letters}-{rng.integers(10, 1000)}"


def draw_value(rng: np.random.Generator) -> str:
    """Mostly five digits, sometimes four to seven, sometimes two words."""
    kind = rng.random()
    if kind < 0.08:
        return " ".join(map(str, rng.choice(WORDS, 2, replace=False)))
    count = 5 if kind < 0.85 else int(rng.integers(4, 8))
    return "".join(map(str, rng.integers(0, 10, count)))


def draw_told(rng: np.random.Generator, count: int, noun: str | None) -> list[Told]:
    """`count` facts of one noun (None: of any) with distinct keys, told in one frame or in any."""
    frame = None if rng.random() < 0.3 else str(rng.choice(FRAMES))
    facts: dict[tuple[str, str], Told] = {}
    while len(facts) < count:
        fact = Told(
            noun or str(rng.choice(NOUNS)),
            draw_subject(rng),
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
