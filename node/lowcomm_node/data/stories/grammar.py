"""The rules of the tiny stories.

A story has a hero, who finds a thing, and a friend, whose trouble that thing can end: what is found
in the second sentence decides what goes wrong in the fourth, and what helps in the sixth. That is
what a model has to carry through a story, beside names and pronouns.

``{name}`` in a text stands for one of the rule of that name, or for a part of the cast. A rule
draws each of its texts equally often.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Character:
    """Somebody in a story."""

    name: str
    she: str
    her: str
    """Whom one meets."""
    hers: str
    """Whose it is, before a noun."""
    animal: str
    home: str


@dataclass(frozen=True)
class Trouble:
    """Something that goes wrong, and the thing that helps."""

    thing: str
    """With its article."""
    short: str
    """What it is called from then on."""
    trouble: str
    """What is wrong with the friend."""
    plea: str
    """What the friend says."""
    help: str
    """What the hero does with the thing."""
    after: str
    """How it is then."""


def _she(name: str, animal: str, home: str) -> Character:
    return Character(name, "she", "her", "her", animal, home)


def _he(name: str, animal: str, home: str) -> Character:
    return Character(name, "he", "him", "his", animal, home)


CHARACTERS = (
    _she("Mira", "fox", "at the edge of the forest"),
    _she("Lily", "rabbit", "under the roots of an oak"),
    _she("Tilda", "turtle", "next to a quiet lake"),
    _she("Wren", "owl", "in a hollow tree"),
    _she("Luna", "cat", "in a house with a red roof"),
    _she("Poppy", "mouse", "behind the village school"),
    _he("Pip", "hedgehog", "in a garden full of roses"),
    _he("Oskar", "bear", "in a cave by the sea"),
    _he("Finn", "frog", "in an old mill by the river"),
    _he("Hugo", "dragon", "in a tower of stone"),
    _he("Leo", "squirrel", "on top of a green hill"),
    _he("Sam", "duck", "near the bridge"),
)

TROUBLES = (
    Trouble(
        "a bright lantern",
        "lantern",
        "{he} could not find the way home in the dark",
        "It is so dark here",
        "{hero} held up the lantern, and they walked down the path together",
        "Soon {friend} saw the lights of home",
    ),
    Trouble(
        "a warm scarf",
        "scarf",
        "{he} was shivering in the cold wind",
        "I am so cold",
        "{hero} put the scarf around {his} neck",
        "Soon {friend} was warm from head to toe",
    ),
    Trouble(
        "a big umbrella",
        "umbrella",
        "{he} was wet all over from the rain",
        "The rain will never stop",
        "{hero} opened the umbrella, and there was room for two",
        "They sat under it and counted the drops",
    ),
    Trouble(
        "a long ladder",
        "ladder",
        "{his} kite was stuck in a tall tree",
        "I can not reach it",
        "{hero} put the ladder against the tree and climbed up",
        "Soon the kite danced in the sky again",
    ),
    Trouble(
        "a strong rope",
        "rope",
        "{he} had fallen into a deep hole",
        "I can not climb out",
        "{hero} let down the rope and pulled and pulled",
        "At last {friend} stood in the sun again",
    ),
    Trouble(
        "a little boat",
        "boat",
        "{he} was alone on an island in the lake",
        "I can not swim",
        "{hero} came over the water in the boat",
        "They rowed back and sang all the way",
    ),
    Trouble(
        "a basket of apples",
        "basket",
        "{he} had not eaten since the day before",
        "I am so hungry",
        "{hero} took two apples out of the basket, one for each",
        "They ate until only the seeds were left",
    ),
    Trouble(
        "a needle and some thread",
        "needle",
        "{his} sail was torn in two",
        "Now my ship can not leave",
        "{hero} took the needle and mended the sail",
        "Soon the ship flew over the waves",
    ),
    Trouble(
        "a wooden flute",
        "flute",
        "{he} had not slept for three nights",
        "I am so tired",
        "{hero} played a soft song on the flute",
        "Soon {friend} was fast asleep and dreamed of clouds",
    ),
    Trouble(
        "a golden key",
        "key",
        "{he} stood in front of a locked door",
        "I can not get in",
        "{hero} put the key into the lock, and it turned",
        "Behind the door was a room full of toys",
    ),
    Trouble(
        "a blue bucket",
        "bucket",
        "all {his} flowers were dry",
        "They need water",
        "{hero} filled the bucket at the well again and again",
        "The next day every flower was in bloom",
    ),
    Trouble(
        "a silver bell",
        "bell",
        "{he} had lost all {his} sheep in the fog",
        "They can not see me",
        "{hero} rang the bell as loudly as {she} could",
        "One by one the sheep came out of the fog",
    ),
    Trouble(
        "an old map",
        "map",
        "{he} was lost and did not know which road to take",
        "Every road looks the same",
        "{hero} opened the map and showed {him} the right road",
        "They were home before dinner",
    ),
    Trouble(
        "a jar of honey",
        "honey",
        "{he} had a sore throat and could not sing",
        "Tonight is my big concert",
        "{hero} made a cup of tea with the honey",
        "That night {friend} sang better than ever",
    ),
    Trouble(
        "a soft feather",
        "feather",
        "{he} had not laughed for a whole week",
        "Nothing is funny any more",
        "{hero} tickled {friend} with the feather",
        "They laughed until they fell over",
    ),
    Trouble(
        "a tiny hammer",
        "hammer",
        "a wheel of {his} cart was broken",
        "Now it will not roll",
        "{hero} fixed the wheel with the hammer",
        "Off they rolled, faster than the wind",
    ),
)

RULES: Mapping[str, tuple[str, ...]] = {
    "story": ("{beginning} {found} {meeting} {asking} {helping} {ending}",),
    "beginning": (
        "Once upon a time there was {adjective} {animal} named {hero}, who lived {home}.",
        "Once upon a time {adjective} {animal} named {hero} lived {home}.",
        "Once upon a time, {home}, there lived {adjective} {animal}. {Her} name was {hero}.",
    ),
    "adjective": (
        "a small",
        "a brave",
        "a clever",
        "a sleepy",
        "a cheerful",
        "a shy",
        "a kind",
        "a curious",
        "an old",
        "a tiny",
    ),
    "found": (
        "One {weather} {time} {she} found {thing} {place}.",
        "One {weather} {time} {hero} went for a walk and found {thing} {place}.",
        "One {time} {hero} got a present. It was {thing}.",
        '{hero} found {thing} {place}. "{hello}!" said {hero}.',
    ),
    "hello": ("How lovely", "What a surprise", "This will be useful", "I will keep it"),
    "weather": ("sunny", "rainy", "windy", "snowy", "foggy", "warm", "cold", "bright"),
    "time": ("morning", "afternoon", "evening", "day"),
    "place": (
        "under a bush",
        "on the road",
        "behind the house",
        "in the grass",
        "at the market",
        "on the beach",
        "between two stones",
        "beside the well",
    ),
    "meeting": (
        "Then {she} heard somebody cry. It was {friend} the {friend_animal}.",
        "On the way home {she} met {friend} the {friend_animal}.",
        "Later that {time} {hero} met {friend} the {friend_animal}.",
        "Not far away sat {friend} the {friend_animal}.",
    ),
    "asking": (
        '{sad}, because {trouble}. "{plea}," said {friend}.',
        '"{question}?" asked {hero}. "{plea}," said {friend}, because {trouble}.',
        '{sad}. "{question}?" asked {hero}. {friend} said that {trouble}.',
    ),
    "sad": (
        "{friend} was very sad",
        "{friend} looked unhappy",
        "A big tear ran down the face of {friend}",
    ),
    "question": ("What is wrong", "Why are you so sad", "Can I help you"),
    "helping": (
        "{hero} thought of the {short}. {help}.",
        'Then {hero} had an idea. "I have {thing}," said {hero}. {help}.',
        '"Do not worry," said {hero}. "{Thing} will help." {help}.',
    ),
    "ending": (
        "{after}. {thanks}",
        "{after}. {thanks} {last}",
        "{after}. {last}",
    ),
    "thanks": (
        '"Thank you, {hero}," said {friend}.',
        '"You are a good friend," said {friend}, and gave {hero} a hug.',
        "{friend} smiled and gave {hero} {gift}.",
    ),
    "gift": (
        "a shiny button",
        "a piece of cake",
        "a red balloon",
        "a kiss on the nose",
        "a bunch of flowers",
        "a warm cookie",
    ),
    "last": (
        "From that day on they were best friends.",
        "And {hero} went home happy.",
        "That night the stars were very bright.",
        "And they danced until the moon came up.",
    ),
}
