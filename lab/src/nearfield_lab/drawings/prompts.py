"""Captions that pictures are asked for by: of sample sheets, and of tests."""

from nearfield_lab.drawings.sets import CATEGORIES

PROMPTS = (
    "a red apple with a green leaf, flat icon",
    "a cat, 3d emoji",
    "smiling face with sunglasses, glossy emoji",
    "a house with a garden, clip art",
    "a rocket, flat emoji",
    "a bicycle, line icon, dark blue on pale yellow",
    "a dragon, game icon, white on black",
    "a slice of cake, shaded emoji",
    "a sailing boat, solid icon, teal on white",
    "a yellow flower, 3d emoji",
    "a cup of coffee, duotone icon",
    "a fire truck, round emoji",
    "a snowman, flat plump icon",
    "a guitar, hand-drawn icon",
    "a blue fish, glossy emoji, on pale green",
    "a tree, low poly icon",
    "a robot, flat emoji",
    "an umbrella, two-tone icon, purple on white",
    "a lightbulb, flat icon",
    "an elephant, shaded emoji",
    "a castle, game icon, dark red on white",
    "a camera, solid icon, black on yellow",
    "a birthday cake with candles, 3d emoji",
    "a clock, clip art",
    "a mushroom, blob emoji",
    "a penguin, flat emoji, on pale blue",
    "a pizza, outlined flat icon",
    "a heart with an arrow, glossy emoji",
    "a bus, solid emoji, green on white",
    "crying face, blob emoji",
    "a bee, 3d emoji",
    "sun behind clouds, weather icon",
    "a treasure chest, game icon, yellow on dark blue",
    "a green frog, shaded emoji",
    "an airplane, solid icon, white on red",
    "a blue car, flat emoji",
    "a wizard, shaded emoji",
    "a book, blue line icon",
    "a soccer ball, 3d emoji",
    "an owl, flat emoji",
    "a telephone, clip art",
    "a lock and a key, flat duotone icon",
    "a horse, game icon, brown on pale green",
    "a crescent moon and stars, flat icon",
    "a lemon, glossy emoji",
    "a police officer, flat emoji",
    "a hot air balloon, 3d emoji",
    "a bear, solid icon, orange on white",
    "a tulip, clip art",
    "a microscope, sticker",
    "a pair of scissors, sharp icon",
    "a turtle, shaded emoji",
    "an ice cream cone, flat emoji",
    "a trophy, gradient icon",
    "a flag on a mountain, line icon, green on white",
    "a hand holding a pen, flat emoji",
    "a purple butterfly, glossy emoji",
    "a train, two-tone icon, red on light grey",
    "a skull, game icon, black on orange",
    "a hamburger, round emoji",
    "a woman with red hair, 3d emoji",
    "a palm tree on an island, shaded emoji",
    "a ghost, blob emoji",
    "a laptop computer, flat icon",
)
"""64, written down before any model was trained, and none exchanged since."""

TEST_STYLES = ("flat emoji", "3d emoji", "shaded emoji", "clip art", "flat icon", "solid icon, blue on white")


def category_prompts(each: int) -> list[tuple[int, str]]:
    """Numbers of categories and captions, `each` for every category, in several styles."""
    return [
        (number, f"{name}, {TEST_STYLES[turn % len(TEST_STYLES)]}")
        for number, name in enumerate(CATEGORIES)
        for turn in range(each)
    ]
