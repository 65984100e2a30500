"""Context parallelism: one sequence over many ranks, where only what is read elsewhere travels."""

from nearfield.parallel.attention import attend
from nearfield.parallel.cuts import even_split, split_between_regions
from nearfield.parallel.far import bytes_summed, summary_split
from nearfield.parallel.messages import Sent, Shapes, bytes_sent
from nearfield.parallel.model import Share, SplitLayer, SplitModel, check_splittable
from nearfield.parallel.ranks import ExchangeFailed, Ranks
from nearfield.parallel.route import Route, Traffic
from nearfield.parallel.split import Split
from nearfield.parallel.tokens import split_tokens

__all__ = [
    "ExchangeFailed",
    "Ranks",
    "Route",
    "Sent",
    "Shapes",
    "Share",
    "Split",
    "SplitLayer",
    "SplitModel",
    "Traffic",
    "attend",
    "bytes_sent",
    "bytes_summed",
    "check_splittable",
    "even_split",
    "split_between_regions",
    "split_tokens",
    "summary_split",
]
