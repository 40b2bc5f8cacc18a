"""Questions about common English words, few-shot."""

import random
from typing import final

from noria.envs.single_turn import SingleTurn

_TEXT = """
able acid across actor adult afraid again agent air album alive almost alone amber anchor angel angry animal ankle answer apple april area
arm army arrow artist autumn avenue baby back badge bag baker ball bamboo banana bank barn basket beach bean bear beauty bed bell belt bench
berry bike bird birth blanket blood board boat body bone book border bottle bowl box brain bread bridge brother brush bucket build butter
button cabin cable cage cake camel camera camp candle cap captain car card carpet castle cat cave chain chair chalk cheese cherry chest
chicken child circle city class clay clean clock cloud clown coach coast coffee coin cold color cook copper corn cotton count cousin cow
crab cream crown cup curtain cycle dance danger daughter day deep deer desert desk diamond dinner dirt doctor dog doll dolphin donkey door
dozen dragon dream dress drink drum duck dust eagle early earth east easy edge egg eight elbow elephant empty engine evening event eye
fabric face factory family farm fast father feather fence ferry field finger fire fish flag flame floor flower fog food foot forest fork
fox frame friend frog fruit future gallery game garden garlic gate ghost giant gift ginger giraffe girl glass globe glove goat gold good
grain grape grass green guest guitar hair hammer hand happy harbor hat hawk heart heavy helmet hill history holiday home honey hook horse
hospital hotel hour house hunter ice idea inch ink insect iron island ivory jacket jail jam january jar jelly jewel job journey judge juice
july jungle junior kettle key kind king kitchen kite knee knife knot label ladder lake lamp land laugh lawyer leaf leather lemon lesson
letter library light lily lion lip list liver lizard lock lunch machine magic magnet man map marble market mask meadow meal melon metal
middle milk minute mirror money monkey month moon morning mother mountain mouse mouth museum music nail name napkin narrow nature neck
needle nephew nest night nine noise noon north nose novel number nurse oak ocean office olive onion open orange orchard oven owl ox page
paint palace panda paper parent park parrot party path peace peach pear pencil pepper person piano picture pig pillow pilot planet plate
pocket poem pond potato powder prince pumpkin puppy purple queen question quick quiet rabbit radio rain ranch raven red ribbon rice ring
river road robin rock roof room root rope rose ruler sad sailor salad salt sand saturn school sea seed seven shadow sheep shelf ship shoe
silver sister six sky sleep smile smoke snake snow soap sofa song soup south space spider spoon spring square stairs star stone storm story
street student sugar summer sun sweet table tail tea teacher ten tent thunder tiger toast today tomato tongue tooth tower town toy train
travel tree tunnel turtle uncle under uniform union valley vase velvet verb village violin visit voice volcano wagon wall water wave wheel
whisper white window winter wolf woman wood world yard year yellow young zebra zero zone
"""

WORDS = tuple(_TEXT.split())
"""Common words in lower case, each once."""


@final
class FirstLetter(SingleTurn):
    """The first letter of a word."""

    examples: str = "first letter of table = t\nfirst letter of garden = g\n"
    question: str = "first letter of {word} ="

    def problem(self, rng: random.Random) -> tuple[str, str]:
        """One word."""
        word = rng.choice(WORDS)
        return self.examples + self.question.format(word=word), word[0]
