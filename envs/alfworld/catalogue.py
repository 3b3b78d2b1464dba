"""The generator's own tables: what stands in which room, what each object is good for, and where it belongs."""

from dataclasses import dataclass
from typing import Final

ROOM_KINDS: Final = ("kitchen", "living_room", "bedroom", "bathroom")

OPENABLE: Final = frozenset({"cabinet", "drawer", "fridge", "microwave", "safe"})
BASINS: Final = {"sinkbasin": "sink", "bathtubbasin": "bathtub"}
"""Receptacle types whose PDDL id is that of the piece of furniture with the basin named behind it."""

LAMP: Final = "desklamp"
LAMP_PLACES: Final = ("desk", "sidetable", "dresser", "shelf")


@dataclass(frozen=True, slots=True)
class ItemKind:
    """One object type: the rooms that have it, what can be done with it, and the receptacles that may hold it."""

    name: str
    rooms: frozenset[str]
    places: frozenset[str]
    uses: frozenset[str]


_ROOM_OF = {"k": "kitchen", "l": "living_room", "b": "bedroom", "w": "bathroom"}
_SETS = {
    "tables": "countertop diningtable sidetable shelf",
    "kept": "countertop diningtable sidetable fridge",
    "living": "armchair coffeetable diningtable dresser ottoman sidetable sofa",
    "study": "bed desk dresser shelf sidetable",
    "paper": "coffeetable desk diningtable drawer dresser shelf sidetable",
    "bath": "bathtubbasin cabinet cart countertop drawer shelf toilet",
}
"""Groups of receptacles that many objects share; a name in a row below stands for itself or for its group."""

_ROWS = """
apple        k   clean heat cool slice    kept garbagecan microwave sinkbasin
bread        k   heat cool slice          kept garbagecan microwave
egg          k   clean heat cool slice    kept garbagecan microwave sinkbasin
lettuce      k   clean cool slice         kept garbagecan sinkbasin
potato       k   clean heat cool slice    kept garbagecan microwave sinkbasin
tomato       k   clean heat cool slice    kept garbagecan microwave sinkbasin
bowl         kb  clean cool hold          tables fridge cabinet desk dresser microwave sinkbasin
cup          k   clean heat cool hold     tables fridge cabinet microwave sinkbasin
mug          kb  clean heat cool hold     tables fridge cabinet coffeemachine desk dresser microwave sinkbasin
plate        kl  clean heat cool hold     tables fridge cabinet coffeetable dresser microwave sinkbasin
pan          k   clean cool hold          countertop diningtable fridge cabinet sinkbasin stoveburner
pot          k   clean cool hold          tables fridge cabinet sinkbasin stoveburner
kettle       k   clean                    tables cabinet sinkbasin stoveburner
butterknife  k   clean                    countertop diningtable sidetable drawer sinkbasin
fork         k   clean                    countertop diningtable sidetable drawer sinkbasin
knife        k   clean                    countertop diningtable sidetable drawer sinkbasin
ladle        k   clean                    countertop diningtable cabinet drawer sinkbasin
spatula      k   clean                    countertop diningtable sidetable drawer sinkbasin
spoon        k   clean                    countertop diningtable sidetable drawer sinkbasin
winebottle   k   cool                     tables fridge cabinet garbagecan
glassbottle  k   -                        tables fridge cabinet microwave sinkbasin
peppershaker k   -                        tables cabinet drawer
saltshaker   k   -                        tables cabinet drawer
dishsponge   kw  clean                    bath diningtable sidetable garbagecan sinkbasin
soapbottle   kw  -                        bath diningtable sidetable garbagecan
candle       wl  -                        bath coffeetable diningtable dresser sidetable
cloth        w   clean                    bath garbagecan sidetable sinkbasin
handtowel    w   -                        bath handtowelholder garbagecan sinkbasin
soapbar      w   clean                    bath garbagecan sinkbasin
spraybottle  w   -                        bath garbagecan dresser
tissuebox    wlb -                        bath paper garbagecan tvstand
toiletpaper  w   -                        bath dresser garbagecan toiletpaperhanger
book         lb  -                        living paper bed cabinet
box          lb  -                        living cabinet desk shelf
newspaper    l   -                        living cabinet drawer garbagecan shelf
pillow       lb  -                        armchair bed ottoman sofa
remotecontrol l  -                        living drawer shelf
statue       lb  -                        coffeetable desk dresser safe shelf sidetable
vase         lb  -                        coffeetable cabinet desk dresser safe shelf sidetable
wateringcan  l   -                        coffeetable cabinet diningtable drawer dresser shelf sidetable
watch        lb  -                        paper
creditcard   lb  -                        living paper safe
keychain     lb  -                        living paper safe
laptop       lb  -                        living bed desk
cellphone    b   -                        study armchair drawer safe
alarmclock   b   -                        desk dresser shelf sidetable
baseballbat  b   -                        bed desk sidetable
basketball   b   -                        bed desk dresser
tennisracket b   -                        bed desk dresser
cd           b   -                        desk drawer dresser garbagecan safe shelf sidetable
pen          b   -                        desk drawer dresser garbagecan shelf sidetable
pencil       b   -                        desk drawer dresser garbagecan shelf sidetable
"""


def _read_rows() -> dict[str, ItemKind]:
    kinds = {}
    for row in _ROWS.strip().splitlines():
        name, rooms, *words = row.split()
        uses = {word for word in words if word in ("clean", "heat", "cool", "slice", "hold")}
        places = {place for word in words if word not in uses | {"-"} for place in _SETS.get(word, word).split()}
        kinds[name] = ItemKind(name, frozenset(_ROOM_OF[room] for room in rooms), frozenset(places), frozenset(uses))
    return kinds


ITEM_KINDS: Final = _read_rows()

ROOM_PLACES: Final[dict[str, dict[str, int]]] = {
    "kitchen": {
        "cabinet": 6,
        "drawer": 5,
        "countertop": 3,
        "stoveburner": 4,
        "fridge": 1,
        "microwave": 1,
        "sinkbasin": 1,
        "garbagecan": 1,
        "coffeemachine": 1,
        "diningtable": 2,
        "shelf": 3,
        "sidetable": 1,
    },
    "living_room": {
        "sofa": 1,
        "armchair": 2,
        "coffeetable": 1,
        "sidetable": 2,
        "drawer": 4,
        "diningtable": 1,
        "dresser": 1,
        "shelf": 4,
        "cabinet": 4,
        "garbagecan": 1,
        "tvstand": 1,
        "ottoman": 1,
        "desk": 1,
        "safe": 1,
    },
    "bedroom": {
        "bed": 1,
        "desk": 2,
        "drawer": 6,
        "sidetable": 2,
        "shelf": 5,
        "dresser": 1,
        "garbagecan": 1,
        "armchair": 1,
        "cabinet": 2,
        "safe": 1,
    },
    "bathroom": {
        "sinkbasin": 2,
        "toilet": 1,
        "countertop": 2,
        "cabinet": 4,
        "drawer": 4,
        "garbagecan": 1,
        "bathtubbasin": 1,
        "handtowelholder": 2,
        "toiletpaperhanger": 1,
        "shelf": 2,
        "cart": 1,
    },
}
"""The receptacle types of each room and the most of each that a room has."""
