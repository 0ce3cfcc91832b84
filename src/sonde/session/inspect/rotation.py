"""Rotation over many sites: each inspection checks a bounded number, and a few inspections check all of them."""

from __future__ import annotations


class RoundRobin:
    """All sites in the first inspection, then at most `max_sites` in each, in turn.

    >>> turns = RoundRobin(max_sites=2)
    >>> [[site for site in "abc" if turns.is_due(site, inspection)] for inspection in range(3)]
    [['a', 'b', 'c'], ['b'], ['a', 'c']]
    """

    __slots__ = ("_max_sites", "_numbers")

    def __init__(self, max_sites: int) -> None:
        self._max_sites = max_sites
        self._numbers: dict[str, int] = {}

    def is_due(self, site: str, inspection: int) -> bool:
        number = self._numbers.setdefault(site, len(self._numbers))
        if inspection == 0:
            return True
        num_turns = -(-len(self._numbers) // self._max_sites)
        return number % num_turns == inspection % num_turns
