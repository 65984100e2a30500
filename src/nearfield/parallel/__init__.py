"""Context parallelism: one sequence over many ranks, where only what is read elsewhere travels."""

from nearfield.parallel.attention import attend
from nearfield.parallel.messages import Sent, Shapes, bytes_sent
from nearfield.parallel.ranks import ExchangeFailed, Ranks
from nearfield.parallel.route import Route, Traffic
from nearfield.parallel.split import Split

__all__ = ["ExchangeFailed", "Ranks", "Route", "Sent", "Shapes", "Split", "Traffic", "attend", "bytes_sent"]
