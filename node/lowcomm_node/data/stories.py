"""Tiny stories from a grammar: text that a small model learns to write in minutes.

A story has a hero with a thing, and a friend in a trouble that the thing can end: what is found
in the second sentence decides what goes wrong in the fourth, and what helps in the sixth. That is
what a model has to carry through a story, beside names and pronouns.

The stories of ``builtin:stories`` and their tokens never change, since signed runs name them:
another grammar needs another name. The same number gives the same bytes on every machine: the
choices come from SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", 2014), not from a library's generator.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import TypeVar

T = TypeVar("T")

NAME = "builtin:stories"
STORIES = 12_000
HELD_OUT_EVERY = 20  # stories, of which one is held out
PIECES = " ?[A-Za-z]+|[^A-Za-z]"
"""How text is cut into tokens, as a regular expression: into words, and single characters."""
_UNUSED = {" An", " Can", " Every", " How", " Nothing", " Now", " Once", " This", " Tonight"}
_UNUSED |= {" What", " Why", "And", "From", "That"}
"""Words that no story has. They keep the numbers of the others as they have always been."""
_SLOT = re.compile(r"\{(\w+)\}")
_WORD = (1 << 64) - 1


# The grammar. ``{name}`` stands for a text of the rule of that name, or for a part of the cast.

_PRONOUNS = {"she": ("her", "her"), "he": ("him", "his")}
_CHARACTERS = """
Mira | she | fox | at the edge of the forest
Lily | she | rabbit | under the roots of an oak
Tilda | she | turtle | next to a quiet lake
Wren | she | owl | in a hollow tree
Luna | she | cat | in a house with a red roof
Poppy | she | mouse | behind the village school
Pip | he | hedgehog | in a garden full of roses
Oskar | he | bear | in a cave by the sea
Finn | he | frog | in an old mill by the river
Hugo | he | dragon | in a tower of stone
Leo | he | squirrel | on top of a green hill
Sam | he | duck | near the bridge
"""
_TROUBLES = """
a bright lantern | lantern | It is so dark here
  {he} could not find the way home in the dark
  {hero} held up the lantern, and they walked down the path together
  Soon {friend} saw the lights of home
a warm scarf | scarf | I am so cold
  {he} was shivering in the cold wind
  {hero} put the scarf around {his} neck
  Soon {friend} was warm from head to toe
a big umbrella | umbrella | The rain will never stop
  {he} was wet all over from the rain
  {hero} opened the umbrella, and there was room for two
  They sat under it and counted the drops
a long ladder | ladder | I can not reach it
  {his} kite was stuck in a tall tree
  {hero} put the ladder against the tree and climbed up
  Soon the kite danced in the sky again
a strong rope | rope | I can not climb out
  {he} had fallen into a deep hole
  {hero} let down the rope and pulled and pulled
  At last {friend} stood in the sun again
a little boat | boat | I can not swim
  {he} was alone on an island in the lake
  {hero} came over the water in the boat
  They rowed back and sang all the way
a basket of apples | basket | I am so hungry
  {he} had not eaten since the day before
  {hero} took two apples out of the basket, one for each
  They ate until only the seeds were left
a needle and some thread | needle | Now my ship can not leave
  {his} sail was torn in two
  {hero} took the needle and mended the sail
  Soon the ship flew over the waves
a wooden flute | flute | I am so tired
  {he} had not slept for three nights
  {hero} played a soft song on the flute
  Soon {friend} was fast asleep and dreamed of clouds
a golden key | key | I can not get in
  {he} stood in front of a locked door
  {hero} put the key into the lock, and it turned
  Behind the door was a room full of toys
a blue bucket | bucket | They need water
  all {his} flowers were dry
  {hero} filled the bucket at the well again and again
  The next day every flower was in bloom
a silver bell | bell | They can not see me
  {he} had lost all {his} sheep in the fog
  {hero} rang the bell as loudly as {she} could
  One by one the sheep came out of the fog
an old map | map | Every road looks the same
  {he} was lost and did not know which road to take
  {hero} opened the map and showed {him} the right road
  They were home before dinner
a jar of honey | honey | Tonight is my big concert
  {he} had a sore throat and could not sing
  {hero} made a cup of tea with the honey
  That night {friend} sang better than ever
a soft feather | feather | Nothing is funny any more
  {he} had not laughed for a whole week
  {hero} tickled {friend} with the feather
  They laughed until they fell over
a tiny hammer | hammer | Now it will not roll
  a wheel of {his} cart was broken
  {hero} fixed the wheel with the hammer
  Off they rolled, faster than the wind
"""
_RULES = """
story:
  {beginning} {found} {meeting} {asking} {helping} {ending}
beginning:
  Once upon a time there was {adjective} {animal} named {hero}, who lived {home}.
  Once upon a time {adjective} {animal} named {hero} lived {home}.
  Once upon a time, {home}, there lived {adjective} {animal}. {Her} name was {hero}.
adjective: a small | a brave | a clever | a sleepy | a cheerful | a shy | a kind | a curious
  an old | a tiny
found:
  One {weather} {time} {she} found {thing} {place}.
  One {weather} {time} {hero} went for a walk and found {thing} {place}.
  One {time} {hero} got a present. It was {thing}.
  {hero} found {thing} {place}. "{hello}!" said {hero}.
hello: How lovely | What a surprise | This will be useful | I will keep it
weather: sunny | rainy | windy | snowy | foggy | warm | cold | bright
time: morning | afternoon | evening | day
place: under a bush | on the road | behind the house | in the grass | at the market | on the beach
  between two stones | beside the well
meeting:
  Then {she} heard somebody cry. It was {friend} the {friend_animal}.
  On the way home {she} met {friend} the {friend_animal}.
  Later that {time} {hero} met {friend} the {friend_animal}.
  Not far away sat {friend} the {friend_animal}.
asking:
  {sad}, because {trouble}. "{plea}," said {friend}.
  "{question}?" asked {hero}. "{plea}," said {friend}, because {trouble}.
  {sad}. "{question}?" asked {hero}. {friend} said that {trouble}.
sad:
  {friend} was very sad
  {friend} looked unhappy
  A big tear ran down the face of {friend}
question: What is wrong | Why are you so sad | Can I help you
helping:
  {hero} thought of the {short}. {help}.
  Then {hero} had an idea. "I have {thing}," said {hero}. {help}.
  "Do not worry," said {hero}. "{Thing} will help." {help}.
ending: {after}. {thanks} | {after}. {thanks} {last} | {after}. {last}
thanks:
  "Thank you, {hero}," said {friend}.
  "You are a good friend," said {friend}, and gave {hero} a hug.
  {friend} smiled and gave {hero} {gift}.
gift: a shiny button | a piece of cake | a red balloon | a kiss on the nose | a bunch of flowers
  a warm cookie
last:
  From that day on they were best friends.
  And {hero} went home happy.
  That night the stars were very bright.
  And they danced until the moon came up.
"""


def _rules() -> Mapping[str, tuple[str, ...]]:
    rules: dict[str, tuple[str, ...]] = {}
    name = ""
    for line in _RULES.strip().splitlines():
        texts = line
        if not line.startswith(" "):
            name, _, texts = line.partition(":")
        rules[name] = rules.get(name, ()) + tuple(filter(None, texts.strip().split(" | ")))
    return rules


def _entries(table: str, names: str) -> Iterator[dict[str, str]]:
    """The entries of a table, each of as many parts as ``names`` has."""
    keys, parts = names.split(), re.split(r"\s*\n\s*| \| ", table.strip())
    for start in range(0, len(parts), len(keys)):
        yield dict(zip(keys, parts[start : start + len(keys)], strict=True))


CHARACTERS = tuple(_entries(_CHARACTERS, "hero she animal home"))
TROUBLES = tuple(_entries(_TROUBLES, "thing short plea trouble help after"))
RULES = _rules()


# A story from its number


def _numbers(seed: int) -> Iterator[int]:
    """Random numbers of 64 bits."""
    state = seed * 0xD1342543DE82EF95 & _WORD
    while True:
        state = mixed = state + 0x9E3779B97F4A7C15 & _WORD
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _WORD
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _WORD
        yield mixed ^ mixed >> 31


def tell(number: int) -> str:
    """The story of a number."""
    numbers = _numbers(number)

    def draw(options: Sequence[T]) -> T:
        # The bias of the remainder is below one in 10^17.
        return options[next(numbers) % len(options) if len(options) > 1 else 0]

    hero = draw(CHARACTERS)
    friend = draw([one for one in CHARACTERS if one is not hero])
    him, his = _PRONOUNS[friend["she"]]
    trouble = draw(TROUBLES)
    cast = {
        **hero,
        **trouble,
        "Her": _PRONOUNS[hero["she"]][1].capitalize(),
        "Thing": trouble["thing"].capitalize(),
        "friend": friend["hero"],
        "friend_animal": friend["animal"],
        "he": friend["she"],
        "him": him,
        "his": his,
    }

    def expand(text: str) -> str:
        return _SLOT.sub(lambda slot: expand(cast.get(slot[1]) or draw(RULES[slot[1]])), text)

    return expand("{story}") + "\n"


def count_rules() -> int:
    """How many texts the grammar has to choose from."""
    return sum(map(len, RULES.values())) + len(TROUBLES) + len(CHARACTERS)


@cache
def words() -> tuple[str, ...]:
    """The words, sorted; token ``256 + n`` is the word of number n."""
    pieces = {piece for number in range(1000) for piece in re.findall(PIECES, tell(number))}
    return tuple(sorted({piece for piece in pieces if len(piece) > 1} | _UNUSED))
