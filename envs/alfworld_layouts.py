"""Small ALFWorld games of our own: rooms drawn from a seed, for all six task types in three sizes.

Invariant: a layout is a function of seed, task type, size and split; it is solvable by construction, and `main` writes
it down only after the real engine was won by its walkthrough, and at its last command. What is to be brought where (the
pair of object and destination, or of object and lamp) is chosen by a hash to be seen in training or not: no game
of `valid_unseen` asks for a pair that any game of `train` or `valid_seen` asks for.

    python -m fr_lightning.envs.alfworld_layouts      # makes the embedded games anew (needs the alfworld extra)

What an object affords and a receptacle holds is ALFWorld's; rooms, sizes and placing are this project's.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import hashlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TASK_TYPES = (
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)
SIZES = {"easy": ((4, 5), (4, 6)), "medium": ((6, 9), (7, 11)), "hard": ((10, 14), (12, 18))}
"""How many receptacles and how many objects a game of a size has, at least and at most."""

GAMES = {"train": 200, "valid_seen": 4, "valid_unseen": 4}
"""Embedded games of each split, task type and size."""

EMBEDDED = Path(__file__).with_name("alfworld_games.json.gz")
UNSEEN_SHARE = 5  # one pair in so many is kept out of training

Place = tuple[str, int]  # a receptacle or an object: its kind, and its number as the game tells it

ROOMS: Mapping[str, tuple[Mapping[str, int], Sequence[str]]] = {  # most of each receptacle; what may lie about
    "kitchen": (
        {"CounterTop": 2, "Cabinet": 4, "Drawer": 3, "Fridge": 1, "Microwave": 1, "SinkBasin": 1, "StoveBurner": 2,
         "DiningTable": 1, "GarbageCan": 1, "Shelf": 2, "CoffeeMachine": 1},
        ("Apple", "Bowl", "Bread", "ButterKnife", "Cup", "DishSponge", "Egg", "Fork", "Knife", "Lettuce", "Mug", "Pan",
         "PepperShaker", "Plate", "Pot", "Potato", "SaltShaker", "SoapBottle", "Spatula", "Spoon", "Tomato",
         "WineBottle"),
    ),
    "bedroom": (
        {"Bed": 1, "Desk": 2, "Drawer": 4, "Shelf": 3, "SideTable": 2, "GarbageCan": 1, "Dresser": 1, "Safe": 1},
        ("AlarmClock", "BaseballBat", "Book", "Bowl", "CD", "CellPhone", "CreditCard", "KeyChain", "Laptop", "Mug",
         "Pen", "Pencil", "Pillow"),
    ),
    "livingroom": (
        {"Sofa": 1, "ArmChair": 2, "CoffeeTable": 1, "SideTable": 2, "Drawer": 4, "Shelf": 3, "GarbageCan": 1,
         "TVStand": 1},
        ("Book", "CreditCard", "KeyChain", "Laptop", "Newspaper", "Pillow", "RemoteControl", "Statue", "TissueBox",
         "Vase", "Watch", "WateringCan"),
    ),
    "bathroom": (
        {"CounterTop": 1, "SinkBasin": 2, "Cabinet": 4, "Drawer": 3, "Toilet": 1, "GarbageCan": 1, "Shelf": 2,
         "ToiletPaperHanger": 1},
        ("Candle", "Cloth", "SoapBar", "SoapBottle", "SprayBottle", "TissueBox", "ToiletPaper"),
    ),
}  # fmt: skip
LAMPS = {"bedroom": ("DeskLamp", ("Desk", "SideTable", "Dresser")), "livingroom": ("FloorLamp", ())}
APPLIANCES = {  # of the tasks that change an object: verb, appliance, what the object must afford, the fact wanted
    "pick_clean_then_place_in_recep": ("clean", "SinkBasin", "Cleanable", "isClean"),
    "pick_heat_then_place_in_recep": ("heat", "Microwave", "Heatable", "isHot"),
    "pick_cool_then_place_in_recep": ("cool", "Fridge", "Coolable", "isCool"),
}
OPENABLE = frozenset({"Cabinet", "Drawer", "Fridge", "Microwave", "Safe"})
WORDING = {
    "pick_and_place_simple": ("put a {o} in {r}", "put some {o} on {r}"),
    "look_at_obj_in_light": ("look at {o} under the {r}", "examine the {o} with the {r}"),
    "pick_clean_then_place_in_recep": ("put a clean {o} in {r}", "clean some {o} and put it in {r}"),
    "pick_heat_then_place_in_recep": ("put a hot {o} in {r}", "heat some {o} and put it in {r}"),
    "pick_cool_then_place_in_recep": ("put a cool {o} in {r}", "cool some {o} and put it in {r}"),
    "pick_two_obj_and_place": ("put two {o} in {r}", "find two {o} and put them in {r}"),
}


@dataclass(frozen=True)
class Layout:
    """One game: what stands where in a room, and what is to be done.

    Attributes:
        receptacles: kind → how many; numbered from 1, as the game numbers them.
        objects: kind, and the receptacle it lies in; objects of a kind are numbered from 1 in this order.
        target: kind of the object to bring.
        destination: kind of the receptacle to bring it to, or of the lamp to look at it under.
        goal: the task in words.
    """

    task_type: str
    room: str
    receptacles: Mapping[str, int]
    objects: tuple[tuple[str, Place], ...]
    target: str
    destination: str
    goal: str

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Layout:
        """From plain data, as JSON gives it back."""
        objects = tuple((kind, (place[0], place[1])) for kind, place in row["objects"])
        return cls(**{**row, "objects": objects})

    def row(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @property
    def pair(self) -> tuple[str, str]:
        return self.target, self.destination

    def problem(self) -> str:
        """The problem in ALFWorld's PDDL domain."""
        from alfworld.gen import constants  # pyright: ignore[reportMissingImports]

        holds, affords = constants.VAL_RECEPTACLE_OBJECTS, constants.VAL_ACTION_OBJECTS
        pool = sorted({*ROOMS[self.room][1], *(kind for kind, _ in self.objects)})
        kinds = sorted(
            {*pool, "Knife", "ButterKnife"}
        )  # the domain's own actions name these two, and three receptacles
        receptacle_kinds = sorted({*self.receptacles, "SinkBasin", "Microwave", "Fridge"})
        places = self._places()
        location = {place: f"loc{number}" for number, place in enumerate(places, start=1)}
        facts = ["atLocation agent1 loc0"]
        for place in places:
            facts += [
                f"receptacleType {_id(place)} {place[0]}Type",
                f"receptacleAtLocation {_id(place)} {location[place]}",
            ]
            if place[0] in OPENABLE:
                facts.append(f"openable {_id(place)}")
        facts += [
            f"canContain {receptacle}Type {kind}Type"
            for receptacle in sorted(self.receptacles)
            for kind in pool
            if kind in holds.get(receptacle, ())
        ]
        objects = self._numbered_objects()
        for item, place in objects:
            kind, name = item[0], _id(item)
            facts += [
                f"objectType {name} {kind}Type",
                f"inReceptacle {name} {_id(place)}",
                f"objectAtLocation {name} {location[place]}",
            ]
            if kind in dict(LAMPS.values()):
                facts.append(f"toggleable {name}")
                continue
            facts.append(f"pickupable {name}")
            facts += [
                f"{afforded.lower()} {name}"
                for afforded in ("Cleanable", "Heatable", "Coolable", "Sliceable")
                if kind in affords[afforded]
            ]
        declared = [
            "agent1 - agent",
            *(f"{kind}Type - otype" for kind in kinds),
            *(f"{kind}Type - rtype" for kind in receptacle_kinds),
            *(f"{_id(item)} - object" for item, _ in objects),
            *(f"{_id(place)} - receptacle" for place in places),
            *(f"loc{number} - location" for number in range(len(places) + 1)),
        ]
        lines = "\n".join
        return (
            f"(define (problem generated)\n(:domain alfred)\n(:objects\n{lines(declared)}\n)\n"
            f"(:init\n{lines(f'({fact})' for fact in facts)}\n)\n(:goal (and {self._goal()}))\n)\n"
        )

    def walkthrough(self) -> list[str]:
        """The commands of one who knows where everything is."""
        objects = self._numbered_objects()
        wanted = [(item, place) for item, place in objects if item[0] == self.target and place[0] != self.destination]
        here: Place | None = None
        opened: set[Place] = set()
        commands: list[str] = []

        def go(place: Place, *, inside: bool = True) -> None:
            nonlocal here
            if place != here:
                commands.append(f"go to {_name(place)}")
            here = place
            if inside and place[0] in OPENABLE and place not in opened:
                commands.append(f"open {_name(place)}")
                opened.add(place)

        for item, place in wanted[: 2 if self.task_type == "pick_two_obj_and_place" else 1]:
            go(place)
            commands.append(f"take {_name(item)} from {_name(place)}")
            if self.task_type == "look_at_obj_in_light":
                lamp, stand = next(entry for entry in objects if entry[0][0] == self.destination)
                go(stand, inside=False)
                commands.append(f"use {_name(lamp)}")
                break
            if self.task_type in APPLIANCES:
                verb, appliance, _, _ = APPLIANCES[self.task_type]
                go((appliance, 1), inside=False)
                commands.append(f"{verb} {_name(item)} with {_name((appliance, 1))}")
            go((self.destination, 1))
            commands.append(f"move {_name(item)} to {_name((self.destination, 1))}")
        return commands

    def _places(self) -> list[Place]:
        return [(kind, number) for kind, count in sorted(self.receptacles.items()) for number in range(1, count + 1)]

    def _numbered_objects(self) -> list[tuple[Place, Place]]:
        """Each object, numbered, and where it lies."""
        counts: dict[str, int] = {}
        numbered = []
        for kind, place in self.objects:
            counts[kind] = counts.get(kind, 0) + 1
            numbered.append(((kind, counts[kind]), place))
        return numbered

    def _goal(self) -> str:
        kind, place = f"{self.target}Type", f"{self.destination}Type"
        lies = "(objectType {o} " + kind + f") (receptacleType ?r {place}) (inReceptacle {{o}} ?r)"
        if self.task_type == "look_at_obj_in_light":
            return (
                f"(exists (?t - object ?r - receptacle ?a - agent ?l - location) (and (objectType ?t {place}) "
                "(toggleable ?t) (isToggled ?t) (receptacleAtLocation ?r ?l) (atLocation ?a ?l) (inReceptacle ?t ?r))) "
                f"(exists (?o - object ?a - agent) (and (objectType ?o {kind}) (holds ?a ?o)))"
            )
        if self.task_type == "pick_two_obj_and_place":
            return (
                "(exists (?r - receptacle ?o1 - object ?o2 - object) (and (not (= ?o1 ?o2)) "
                f"{lies.format(o='?o1')} {lies.format(o='?o2')}))"
            )
        changed = ""
        if self.task_type in APPLIANCES:
            _, _, afforded, fact = APPLIANCES[self.task_type]
            changed = f"({afforded.lower()} ?o) ({fact} ?o) "
        return f"(exists (?r - receptacle ?o - object) (and {changed}{lies.format(o='?o')}))"


def is_unseen(pair: tuple[str, str]) -> bool:
    """Whether a pair of object and destination is kept out of training."""
    return hashlib.blake2b("/".join(pair).encode(), digest_size=4).digest()[0] % UNSEEN_SHARE == 0


def draw(rng: random.Random, task_type: str, size: str, *, unseen: bool) -> Layout:
    """A game of that type and size whose pair is seen in training, or is not."""
    while True:
        layout = _attempt(rng, task_type, size, unseen)
        if layout is not None:
            return layout


def _attempt(rng: random.Random, task_type: str, size: str, unseen: bool) -> Layout | None:
    from alfworld.gen import constants  # pyright: ignore[reportMissingImports]

    holds, affords = constants.VAL_RECEPTACLE_OBJECTS, constants.VAL_ACTION_OBJECTS
    (fewest, most), (fewest_objects, most_objects) = SIZES[size]
    _, appliance, afforded, _ = APPLIANCES.get(task_type, ("", "", "", ""))
    rooms = [
        room for room, (stands, _) in ROOMS.items()
        if (room in LAMPS if task_type == "look_at_obj_in_light" else not appliance or appliance in stands)
    ]  # fmt: skip
    room = rng.choice(rooms)
    stands, pool = ROOMS[room]
    homes = {kind: [place for place in stands if kind in holds.get(place, ())] for kind in pool}
    if task_type == "look_at_obj_in_light":
        lamp, lamp_stands = LAMPS[room]
        pairs = [(kind, lamp) for kind in pool if homes[kind]]
    else:
        lamp, lamp_stands = "", ()
        pairs = [
            (kind, place) for kind in pool for place in homes[kind]
            if len(homes[kind]) > 1 and place != appliance and (not afforded or kind in affords[afforded])
        ]  # fmt: skip
    pairs = [pair for pair in pairs if is_unseen(pair) == unseen]
    if not pairs:
        return None
    target, destination = rng.choice(pairs)

    sources = [place for place in homes[target] if place != destination]
    needed = [rng.choice(sources)]
    if lamp:
        needed.append(rng.choice([place for place in stands if place in lamp_stands] or sorted(set(stands) - OPENABLE)))
    else:
        needed.append(destination)
    if appliance:
        needed.append(appliance)
    receptacles = dict.fromkeys(sorted(set(needed)), 1)
    total = rng.randint(fewest, most)
    while sum(receptacles.values()) < total:
        spare = [place for place, limit in stands.items() if receptacles.get(place, 0) < limit]
        if not spare:
            break
        added = rng.choice(spare)
        receptacles[added] = receptacles.get(added, 0) + 1
    places = [(kind, number) for kind, count in sorted(receptacles.items()) for number in range(1, count + 1)]

    copies = 2 if task_type == "pick_two_obj_and_place" else 1
    others = [kind for kind in pool if kind != target and any(place[0] in homes[kind] for place in places)]
    kinds = [target] * copies + [rng.choice(others) for _ in range(rng.randint(fewest_objects, most_objects) - copies)]
    objects: list[tuple[str, Place]] = []
    for kind in kinds:
        fits = [place for place in places if place[0] in homes[kind] and (kind != target or place[0] != destination)]
        objects.append((kind, rng.choice(fits)))
    if lamp:
        objects.append((lamp, (needed[1], rng.randint(1, receptacles[needed[1]]))))
    goal = rng.choice(WORDING[task_type]).format(o=target.lower(), r=destination.lower())
    return Layout(task_type, room, receptacles, tuple(objects), target, destination, goal)


def generate(seed: int, games: Mapping[str, int]) -> Iterator[tuple[str, str, str, Layout]]:
    """(id, split, size, layout) for so many games per split, type and size; no layout twice."""
    known: set[str] = set()
    for split, count in games.items():
        for task_type in TASK_TYPES:
            for size in SIZES:
                for number in range(count):
                    rng = random.Random(f"{seed}/{split}/{task_type}/{size}/{number}")
                    while True:
                        layout = draw(rng, task_type, size, unseen=split == "valid_unseen")
                        if (fingerprint := json.dumps(layout.row(), sort_keys=True)) not in known:
                            break
                    known.add(fingerprint)
                    yield f"{split}/{task_type}/{size}-{number}", split, size, layout


def _id(place: Place) -> str:
    """The PDDL name from which ALFWorld makes the kind and the number again: it counts sorted names backwards."""
    kind, number = place
    if kind.endswith("Basin"):
        return f"{kind.removesuffix('Basin')}_bar_{99 - number:02d}_bar_{kind}"
    return f"{kind}_bar_{99 - number:02d}"


def _name(place: Place) -> str:
    return f"{place[0].lower()} {place[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=EMBEDDED)
    parser.add_argument("--train", type=int, default=GAMES["train"], help="training games per task type and size")
    parser.add_argument(
        "--validation", type=int, default=GAMES["valid_seen"], help="the same, of each validation split"
    )
    chosen = parser.parse_args()

    from fr_lightning.envs.alfworld_workers import Workers, WorkerSettings

    counts = {"train": chosen.train, "valid_seen": chosen.validation, "valid_unseen": chosen.validation}
    rows = []
    workers = Workers(WorkerSettings(processes=1))
    try:
        for name, split, size, layout in generate(chosen.seed, counts):
            session = workers.session(name, {"layout": layout.row()})
            won = [session.start().won, *(session.step(command).won for command in layout.walkthrough())]
            session.close()
            if True not in won or won.index(True) != len(won) - 1:
                raise RuntimeError(f"{name}: the walkthrough does not win by its last command: {won}")
            rows.append({"id": name, "split": split, "size": size, "layout": layout.row()})
    finally:
        workers.close()
    text = json.dumps(rows, separators=(",", ":"))
    chosen.output.write_bytes(gzip.compress(text.encode(), mtime=0))
    size = chosen.output.stat().st_size / 1024
    print(f"{len(rows)} games, each won by its walkthrough: {chosen.output} ({size:.0f} KiB)")


if __name__ == "__main__":
    main()
