"""Where and when blocks of a model run on merged tokens: fields that all methods that merge have.

`skip_blocks` says how many of the first blocks of a kind do not; `groups` how many consecutive ones use one map;
`refresh` after how many denoising steps a map's destinations and its shares are made anew;
`size_bias` whether merged keys count as often as they have tokens.
"""

from typing import Literal, get_args

from nearfield._checks import check_int, check_member, wrong_type

Kind = Literal["joint", "single", "plain"]
Groups = int | Literal["auto"]
Pair = tuple[int, int]


def check_groups(groups: object) -> None:
    if groups != "auto":
        check_int("groups", groups, at_least=1)


def checked_pair(name: str, pair: object, least: int, meaning: str) -> Pair:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        wrong_type(name, f"be a pair {meaning}", repr(pair))
    for value in pair:
        check_int(name, value, at_least=least)
    return pair[0], pair[1]


def group_of(kind: Kind, block: int, skip_blocks: Pair, groups: Groups) -> int | None:
    """Which group the n-th block of a kind belongs to; None: it is not merged."""
    check_member("kind", kind, get_args(Kind))
    check_int("block", block, at_least=0)
    place = block - dict(zip(get_args(Kind), (*skip_blocks, 0), strict=True))[kind]
    if place < 0:
        return None
    return 0 if groups == "auto" else place // groups


def phase_of(step: int, refresh: Pair) -> Pair:
    """Counts the renewals of destinations and shares: what was made in the same phase may be used again."""
    check_int("step", step, at_least=0)
    destinations, shares = refresh
    return step // destinations, step // shares
