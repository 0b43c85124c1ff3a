"""A story from its number, and all of them as a source of text.

The same number gives the same bytes on every machine: the choices come from SplitMix64 (Steele, Lea
and Flood, "Fast splittable pseudorandom number generators", 2014), not from a library's generator.
"""

import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

from lowcomm_node.data.documents import Reading
from lowcomm_node.data.source import Document
from lowcomm_node.data.stories.grammar import CHARACTERS, RULES, TROUBLES, Character

T = TypeVar("T")

NAME = "builtin:stories"
STORIES = 12_000
HELD_OUT_EVERY = 20
"""Every so many stories one is held out."""
_SLOT = re.compile(r"\{(\w+)\}")
_WORD = (1 << 64) - 1


class Choices:
    """Draws with equal chances, from a number alone."""

    def __init__(self, number: int) -> None:
        self._state = number * 0xD1342543DE82EF95 & _WORD
        self.nats = 0.0
        """Information in all draws so far."""

    def draw(self, options: Sequence[T]) -> T:
        """One of a few."""
        if len(options) == 1:
            return options[0]
        self.nats += math.log(len(options))
        # The bias of the remainder is below one in 10^17.
        return options[self._next() % len(options)]

    def _next(self) -> int:
        self._state = self._state + 0x9E3779B97F4A7C15 & _WORD
        mixed = self._state
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _WORD
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _WORD
        return mixed ^ mixed >> 31


def tell(number: int) -> tuple[str, float]:
    """The story of a number, and the nats of the choices in it: a model can't do better."""
    choices = Choices(number)
    hero = choices.draw(CHARACTERS)
    friend = choices.draw(tuple(one for one in CHARACTERS if one is not hero))
    trouble = choices.draw(TROUBLES)
    cast = _cast(hero, friend) | {
        "thing": trouble.thing,
        "Thing": trouble.thing.capitalize(),
        "short": trouble.short,
        "trouble": trouble.trouble,
        "plea": trouble.plea,
        "help": trouble.help,
        "after": trouble.after,
    }
    return _expand("{story}", cast, choices) + "\n", choices.nats


def _cast(hero: Character, friend: Character) -> dict[str, str]:
    return {
        "hero": hero.name,
        "friend": friend.name,
        "animal": hero.animal,
        "home": hero.home,
        "friend_animal": friend.animal,
        "she": hero.she,
        "hers": hero.hers,
        "Her": hero.hers.capitalize(),
        "he": friend.she,
        "him": friend.her,
        "his": friend.hers,
    }


def _expand(text: str, cast: Mapping[str, str], choices: Choices) -> str:
    def replacement(slot: re.Match[str]) -> str:
        name = slot[1]
        return _expand(cast[name] if name in cast else choices.draw(RULES[name]), cast, choices)

    return _SLOT.sub(replacement, text)


def count_rules() -> int:
    """How many texts the grammar has to choose from."""
    return sum(map(len, RULES.values())) + len(TROUBLES) + len(CHARACTERS)


@dataclass(frozen=True)
class StoryCorpus:
    """`STORIES` stories; one in `HELD_OUT_EVERY` is held out."""

    name: str = NAME
    origin: str = NAME

    def fingerprint(self) -> str:
        """See Corpus."""
        return hashlib.sha256("".join(_all()).encode()).hexdigest()

    @property
    def size(self) -> int:
        """See Corpus."""
        return sum(map(len, _all()))  # all characters are ASCII

    def documents(self, reading: Reading | None = None) -> Iterator[Document]:
        """See Corpus."""
        for number, story in enumerate(_all()):
            if reading is not None:
                reading.end(len(story))
            yield Document(story.encode(), number % HELD_OUT_EVERY == 0)


@cache
def _all() -> tuple[str, ...]:
    return tuple(tell(number)[0] for number in range(STORIES))
