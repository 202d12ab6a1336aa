"""The closed vocabulary of the bundled model's language: 302 tokens, one per word.

Word order is the token id, so these tuples are part of the bundled model: append, never reorder.
"""

from __future__ import annotations

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
SPECIAL = (PAD, BOS, EOS, UNK)
FUNCTION = ("the", "in", ".", "?", "code", "item", "set", "=", "both", "vote", "bell", "recall", "mark")
ORDINALS = ("first", "second", "third")
NUMBERS = ("one", "two", "three", "four", "five", "six")
KEYS = tuple(
    "amber azure beige black blond blue bronze brown coral cream crimson cyan denim ebony emerald fawn "
    "gold gray green hazel indigo ivory jade khaki lemon lilac lime linen magenta mango maroon mauve "
    "mint mocha navy ochre olive onyx orange orchid peach pearl pink plum puce purple red rose ruby "
    "russet rust saffron salmon sand sepia silver slate tan teal topaz violet wheat white yellow".split()
)
VALUES = tuple(
    "anchor apple arrow barrel basket beacon bottle bridge bucket candle carpet castle chain clock cloud "
    "compass copper cradle crown dagger drum engine feather fiddle flag flute fork garden glove hammer "
    "harp helmet hinge jacket kettle ladder lamp lantern lever locket marble mirror needle nickel oar "
    "paddle parcel pencil pillow pocket ribbon rocket saddle scarf shovel spoon staple thimble ticket "
    "trumpet tunnel vessel wagon whistle".split()
)
VARIABLES = tuple(
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho sigma tau "
    "upsilon phi chi psi omega aleph beth gimel daleth waw zayin heth yodh".split()
)
CANDIDATES = tuple("alice bruno clara derek edith felix greta henry irene jonas karen louis".split())
NOUNS = tuple(
    "actor baker bear bishop cat clerk cousin cow crow dancer deer doctor dog donkey duke falcon farmer "
    "fox frog goat goose guard horse hunter judge king lawyer lion maid miner monk mouse nurse owl pilot "
    "poet queen rabbit sailor wolf".split()
)
VERBS = tuple(
    "admires avoids blames calls carries chases draws feeds finds follows greets guides hears helps hides "
    "leads meets paints praises pushes sees teaches thanks warns".split()
)
ADJECTIVES = tuple(
    "angry brave bright busy calm clever cold cruel eager fair gentle grim happy humble idle jolly kind "
    "lazy loud merry noble old proud quiet".split()
)
PLACES = tuple(
    "attic barn cabin cave cellar chapel forest harbor kitchen library market meadow mill palace tavern valley".split()
)
WORDS = (
    SPECIAL
    + FUNCTION
    + ORDINALS
    + NUMBERS
    + KEYS
    + VALUES
    + VARIABLES
    + CANDIDATES
    + NOUNS
    + VERBS
    + ADJECTIVES
    + PLACES
)
TOKEN_ID = {word: index for index, word in enumerate(WORDS)}
