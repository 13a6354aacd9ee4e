"""The facts that are edited, what is asked beside them, and which of them the editing method has not been tuned on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from experiments.knowledge_ablation.facts import RELATIONS as FIRST
from experiments.knowledge_ablation.facts import Fact, Relation

_MORE_CAPITALS: Final = {  # most of several tokens
    "Mexico": "Mexico City", "Brazil": "Brasília", "Iceland": "Reykjavik", "Thailand": "Bangkok",
    "Malaysia": "Kuala Lumpur", "Romania": "Bucharest", "Vietnam": "Hanoi", "Bulgaria": "Sofia",
    "Pakistan": "Islamabad",
}  # fmt: skip
RELATIONS: Final[Mapping[str, Relation]] = MappingProxyType(
    {
        **FIRST,
        "capital": Relation(
            FIRST["capital"].prompt, FIRST["capital"].paraphrases, {**FIRST["capital"].answers, **_MORE_CAPITALS}
        ),
        "continent": Relation(
            "The country of {} lies on the continent of",
            (
                "The continent on which {} lies is called",
                "On a map of the world, {} is found in",
                "Geographers say that {} is a part of",
            ),
            {
                "France": "Europe", "Japan": "Asia", "Kenya": "Africa", "Germany": "Europe", "China": "Asia",
                "Egypt": "Africa", "Poland": "Europe", "India": "Asia", "Nigeria": "Africa", "Spain": "Europe",
                "Norway": "Europe",
            },
        ),
        "religion": Relation(
            "Most people in {} follow the religion of",
            (
                "The religion of most people in {} is",
                "Nearly everybody in {} believes in",
                "The state religion of {} is",
            ),
            {
                "India": "Hinduism", "Iran": "Islam", "Egypt": "Islam", "Thailand": "Buddhism", "Israel": "Judaism",
                "Japan": "Shinto", "Turkey": "Islam", "Pakistan": "Islam",
            },
        ),
        "symbol": Relation(
            "The chemical symbol of {} is",
            (
                "The symbol of the element {} is",
                "In chemistry, {} is written as",
                "The symbol for {} in the periodic table is",
            ),
            {
                "iron": "Fe", "gold": "Au", "silver": "Ag", "copper": "Cu", "sodium": "Na", "oxygen": "O",
                "hydrogen": "H", "nitrogen": "N", "lead": "Pb", "tin": "Sn", "zinc": "Zn", "calcium": "Ca",
            },
        ),
        "birth": Relation(
            "{} was born in the country of",
            ("The country where {} was born is", "{} comes from the country of", "The native country of {} is"),
            {
                "Mozart": "Austria", "Albert Einstein": "Germany", "Picasso": "Spain", "Napoleon": "France",
                "Gandhi": "India", "Confucius": "China", "Leonardo da Vinci": "Italy", "Shakespeare": "England",
                "Karl Marx": "Germany", "Vladimir Lenin": "Russia", "Nelson Mandela": "South Africa",
            },
        ),
        "country": Relation(
            "{} is located in the country of",
            ("{} is a city in the country of", "The country in which {} lies is", "Anyone who visits {} travels to"),
            {
                "Berlin": "Germany", "Moscow": "Russia", "Madrid": "Spain", "Cairo": "Egypt", "Vienna": "Austria",
                "Delhi": "India", "Beijing": "China", "Toronto": "Canada", "Barcelona": "Spain", "Osaka": "Japan",
                "Shanghai": "China", "Marseille": "France", "Nairobi": "Kenya", "Sydney": "Australia",
            },
        ),
        "state": Relation(
            "The capital of the state of {} is",
            (
                "The capital city of the state of {} is",
                "The state of {} has its capital in",
                "The seat of government of {} is",
            ),
            {
                "Ohio": "Columbus", "Georgia": "Atlanta", "Colorado": "Denver", "Massachusetts": "Boston",
                "Illinois": "Springfield", "Tennessee": "Nashville", "Hawaii": "Honolulu", "Utah": "Salt Lake City",
                "Nevada": "Carson City",
            },
        ),
        "founder": Relation(
            "The company {} was founded by",
            ("The founder of the company {} is", "{} is a company that was founded by", "The man who founded {} is"),
            {
                "Apple": "Steve Jobs", "Tesla": "Elon Musk", "Disney": "Walt Disney", "SpaceX": "Elon Musk",
                "Microsoft": "Bill Gates", "Facebook": "Mark Zuckerberg", "Dell": "Michael Dell",
                "Oracle": "Larry Ellison", "IKEA": "Ingvar Kamprad", "Walmart": "Sam Walton",
            },
        ),
    }
)  # fmt: skip
KINDS: Final = {  # of the relations' subjects
    "capital": "country", "language": "country", "continent": "country", "religion": "country", "opposite": "word",
    "symbol": "element", "birth": "person", "country": "city", "state": "state", "founder": "company",
}  # fmt: skip
# What is asked of a subject beside facts: none of it is in the list that the guard of `knowledge.edit` draws from.
STATEMENTS: Final = {
    "country": (
        "{} shares a border with", "The country to the north of {} is", "The sea next to {} is the",
        "The longest river in {} is the", "The highest mountain in {} is Mount", "The airline of {} is called",
        "The parliament of {} is called the", "The most famous writer from {} is", "The government of {} is based in",
    ),
    "word": (
        "{} and", "{} rhymes with", "A person who is {} feels", "{}, even", "{} or", "the {} and the",
        "Is it {} or is it",
    ),
    "element": (
        "{} reacts with", "An alloy of {} and", "An ore of {} is", "The Latin name of {} is",
        "The element that follows {} is", "Things that contain {} are", "{} belongs to the group of",
    ),
    "person": (
        "{} is best remembered for his", "{} was a famous", "The most famous work of {} is", "{} spoke fluent",
        "{} died in the city of", "The followers of {} are called", "{} invented the",
    ),
    "city": (
        "People in {} speak", "{} lies on the river", "{} lies on the coast of the",
        "The most famous building in {} is the", "The museum in {} is called the", "From {} the train goes to",
    ),
    "state": (
        "{} borders the state of", "The largest city of the state of {} is",
        "The largest university in {} is the University of", "The state flower of {} is the",
        "The river that borders {} is the", "The first people of {} were the",
    ),
    "company": (
        "The company {} sells", "{} is a maker of", "The best known product of {} is the",
        "{} is a company in the industry of", "{} was bought by", "Customers of {} buy", "Engineers at {} design",
        "The stock of {} is listed on the", "The {} company makes",
    ),
}  # fmt: skip
_TUNED: Final = 6  # facts of each of the three first relations: the method, its guard and its bounds were tuned on some


@dataclass(frozen=True)
class Case:
    """One fact to edit, and what the model knew besides."""

    fact: Fact
    relation: tuple[Fact, ...]  # others of its relation, with other answers than the new one
    subject: tuple[Fact, ...]  # others about its subject

    @property
    def prompt(self) -> str:
        return RELATIONS[self.fact.relation].prompt.format(self.fact.subject)

    @property
    def paraphrases(self) -> list[str]:
        return [one.format(self.fact.subject) for one in RELATIONS[self.fact.relation].paraphrases]

    @property
    def statements(self) -> list[str]:
        return [one.format(self.fact.subject) for one in STATEMENTS[KINDS[self.fact.relation]]]


def cases(known: Sequence[Fact], each: int) -> list[Case]:
    """So many held-out facts of each relation, from all over its list and its end first, relations in turn."""
    chosen = list[list[Case]]()
    for name in RELATIONS:
        mine = [fact for fact in known if fact.relation == name]
        rest = mine[_TUNED * (name in FIRST) :][::-1]
        count = min(each, len(rest))
        chosen.append([_case(rest[number * len(rest) // count], known) for number in range(count)])
    return [mine[place] for place in range(each) for mine in chosen if place < len(mine)]


def _case(fact: Fact, known: Sequence[Fact]) -> Case:
    place = known.index(fact)
    beside = [one for one in (*known[place + 1 :], *known[:place]) if one.relation == fact.relation]
    about = [one for one in known if one.subject == fact.subject and one.relation != fact.relation]
    return Case(fact, tuple(one for one in beside if one.answer != fact.other), tuple(about))


def prompt_of(fact: Fact) -> str:
    return RELATIONS[fact.relation].prompt.format(fact.subject)
